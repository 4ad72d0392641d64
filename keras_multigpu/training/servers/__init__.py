"""Training steps that other processes or devices compute, while this process keeps the model.

elsewhere            copies of the model's values, where the steps run
parameter_servers    workers that compute, servers that hold values, and their steps
tpus                 the cores of TPUs, and their step
"""
