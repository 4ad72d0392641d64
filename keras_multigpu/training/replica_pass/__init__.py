"""Forward and backward over one replica's rows, as pure functions of the variables' values.

    pure_model ───> loss_reduction ───> passes ───> sums
    forward         one number          backward    values, additive_metrics

A pass returns an outcome and its `layout`, which says what lies where in the packs that replicas
sum. `values` give each replica its own draws, and make of what it has changed one device's value;
`loss_reduction` finds losses that are not sums over examples, `rows_flow`, by the `flow_rules` of
operations, where a user's code relates rows; `output_rows` which axis counts them;
`sync_batch_norm` has the moments of all.
"""
