"""The step of one device, split into the parts of replicas, which `runners` run.

steps_of_model     steps for the batches that come, compiled
request            what a step is made of
one_device         a model's step as one device runs it
traced_step        that step as a graph, and the variables that it uses
passes             what happens to a step before its first run
partitioned_step   a step traced, and the part of it that each replica runs
batches            which tensors hold rows, and what a part of the step takes of them
results            what the parts return, and the outputs of the whole step
self_check         whether a split step gives the numbers of one device (`trial`, `unsplit`)
same_on_workers    whether all processes have traced the same step
"""
