"""Training on replicas: a Keras model whose batch is shared.

    distribute ──> distributed_model ──> loops ───────> replication ──────> steps/
                   Keras's methods       epochs, run    steps, compiled     of a batch
                                         feed/ ahead

One step, on each replica:

    shares ──> replica_pass/ ───────> exchange/ ────> update/
    its rows   forward, backward      sums travel     new values

`replica_group` is the only place that knows which replicas exist and how they exchange values;
`variables/` says where values live. `run` is what callbacks may ask, `steps/probes` what they
measure inside a step. `fit_arguments` names mistakes before the first step, `workers` is how
several processes train together, and `servers/` how one tells parameter servers'
workers, or TPUs, what to compute.
"""
