"""Who computes a training step elsewhere, while the model stays with this process.

elsewhere            copies of the model's values with those who compute
parameter_servers    workers that compute, servers that hold values, and their steps
tpus                 the cores of TPUs, and their step
"""
