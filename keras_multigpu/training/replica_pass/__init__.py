"""Forward and backward over one replica's rows, as pure functions of the variables' values.

    pure_model ───> loss_reduction ───> passes ───> sums
    forward         one number          backward    additive_metrics

A pass returns an outcome and its layout, which says what lies where in the packs that replicas
sum. `pure_model` gives each replica its own draws, and makes of what it has changed one device's;
`loss_reduction` finds losses that are not sums over examples, `rows_flow` where a user's code
relates rows (`moved_axis` knows where they stand after operations that move them); `output_rows`
which axis counts them.
"""
