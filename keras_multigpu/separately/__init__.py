"""Independent models side by side, one on each device.

train_separately    the public function: the queue of jobs, their progress, their results
jobs                a function or a script in its own process, and its result
slots               the GPU or the cores that a job has to itself
"""
