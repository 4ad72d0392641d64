"""Forward and backward over one replica's rows, as pure functions of the variables' values.

    pure_model ───> loss_reduction ───> passes ───> sums
    forward         one number          backward    moving_statistics, additive_metrics

`related_rows` finds losses that are not sums over examples, `output_rows` which axis counts them;
`randomness` gives each replica its own draws; `sync_batch_norm` has the moments of all.
"""
