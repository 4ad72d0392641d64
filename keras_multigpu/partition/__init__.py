"""Splits the graph of one device's step over replicas. It knows graphs, and nothing of Keras.

    a traced step ──> facts ──────────> layouts ─────────> a local graph ──> outcome
                      how long axes     how each tensor    what every        results, and
                      are, what shapes  lies on the        replica runs      new values of
                      hold              replicas                             variables

The way is `local_step.py`, `facts.py` (with `lengths.py` and `values.py`), `planner.py`,
`splitter.py` and `conversions.py`. What an operation may do with rows and with open sums is in
`rules/`, with families of operations that behave alike in `families.py`; the tests try each of
them by numbers. `layouts.py` and `sizes.py` have the words,
`local_numbers.py` what a replica knows of its rows, `randomness.py` its rows of random numbers.
"""
