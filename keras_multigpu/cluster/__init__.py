"""Several worker processes: who they are, and what starts them.

environment        Cluster: the workers and which of them this process is, from TF_CONFIG
settings           how long workers wait for each other, from the environment
failures           what happened to a worker, in a sentence, on every other one
slurm              the workers from SLURM's variables
launcher           starts the workers of a training, watches them, ends them together
worker_commands    what starts each of them, here or on other machines
ports, gpus        what this machine has for them
"""
