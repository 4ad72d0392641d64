"""Who computes a training step elsewhere, while the model stays with this process.

connection            Elsewhere: copies of the model's values with those who compute
parameter_servers     Servers: what runs where, by one coordinator
served_step           a step whose stages workers compute, which wait for each other
asynchronous_step     a step that a worker takes whole
tpus                  a step on the cores of TPUs
"""
