"""Independent models side by side, one on each device.

train_separately    the public function: the queue of jobs, a line for each, what comes back
jobs                a function or a script as a process; what became of it
slots               which GPU or which cores a job has to itself
"""
