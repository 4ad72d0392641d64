"""What runs a training step, split or whole: on replicas, or where other processes or devices are.

runner            what all have in common
replica_runner    a split step, on the replicas of this process, together with those of others
whole_step        a step that is not split, on one replica
elsewhere         copies of the model's values, where other steps run
servers           workers of parameter servers, and their steps
tpus              the cores of TPUs, and their step
"""
