"""How replicas share a model's step, in words and figures; nothing here runs a step.

explain            plans the step for any number of replicas, and prints how they share it
explanation        the result, as a table
memory             estimates what the step will hold on each device
liveness           which values a replica holds at the same time
planning           the batches that a model will see, and a step for them, planned
"""
