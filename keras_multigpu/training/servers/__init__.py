"""Who computes a training step elsewhere, while the model stays with this process.

connection    Elsewhere, Servers: what runs where, and copies of the model's values
step          a step whose passes the workers of parameter servers compute
tpus          a step on the cores of TPUs
"""
