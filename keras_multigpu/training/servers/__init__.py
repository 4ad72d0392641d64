"""Who computes a training step elsewhere, while the model stays with this process.

connection           Elsewhere: copies of the model's values with those who compute
parameter_servers    Servers: workers that compute, and servers that hold values
served_step          a step whose stages the workers compute
asynchronous_step    a step that one of them computes whole, while others compute theirs
tpus                 TPUs, and a step on their cores
step_elsewhere       which of these steps it is
"""
