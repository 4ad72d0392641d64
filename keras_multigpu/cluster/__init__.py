"""Several worker processes: who they are, and what starts them.

environment        Cluster: the workers and which of them this process is, from TF_CONFIG
slurm              the same from SLURM's variables
launcher           starts the workers of a training, watches them, ends them together
worker_commands    what starts each of them, here or on other machines
ports, gpus        what this machine has for them
"""
