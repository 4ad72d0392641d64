"""Training on replicas: a Keras model whose batch is shared.

    distribute ──> distributed_model ──> loops ───────> replication ──────> steps/
                   Keras's methods       epochs, run    steps, compiled     of a batch
                                         feed/ ahead

`steps/` splits one step with the help of `keras_multigpu.partition`, and `runners/` run it; what
happens before its first run, `steps/passes` lists:

    the model's step ──> a replica's part ────────> stages ──────────> new values
    traced for one       one graph for all, which   run on its rows;   assigned on each
    device               `partition` makes          exchange/ sums     together

`replica_group` is the only place that knows which replicas exist and how they exchange values, and
`variables/` where values live. `run` is what callbacks may ask, `watching/probe` what they measure
inside a step. `fit_arguments` names mistakes before the first step, and `workers` lets several
processes train together.
"""
