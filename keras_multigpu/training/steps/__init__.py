"""The step of one device, split over the replicas.

steps_of_model     steps for the batches that come, compiled
setting            where they run
split_step         any step, or one without a graph
split_train_step   one of training, into which probes look
probes             what callbacks measure and forbid inside a step
watched            what probes are shown, and what follows (`noted_step`, `taps`)
own_examples       a loss as if the examples of one replica were all (`own_parts`)
self_check         whether a split step gives the numbers of one device (`trial`)
set_apart          batches whose leaves differ in length where those of others do not
same_batch         whether all processes have read the same batch (`same_graph`: and traced alike)
"""
