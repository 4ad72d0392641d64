"""Training on replicas: a Keras model whose batch is shared.

    distribute ──> distributed_model ──> loops ───────> replication ──────> steps/
                   Keras's methods       epochs, run    steps, compiled     of a batch
                                         feed/ ahead

One step, split by `keras_multigpu.partition`:

    the model's step ──> a replica's part ────────> stages ──────────> new values
    traced for one       one graph for all, which   run on its rows;   assigned on each
    device               `partition` makes          exchange/ sums     together

`replica_group` is the only place that knows which replicas exist and how they exchange values;
`variables/` says where values live. `run` is what callbacks may ask, `steps/probes` what they
measure inside a step, `memory` what a step will hold. `fit_arguments` names mistakes before the
first step, `workers` is how several processes train together, and `servers/` how one tells
parameter servers' workers, or TPUs, what to compute.
"""
