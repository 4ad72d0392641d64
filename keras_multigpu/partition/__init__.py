"""Splits the graph of one device's step over replicas. It knows graphs, but nothing of Keras.

    program ───────> facts ──────────> plans ───────────> local graph ──> outcome
    one device's     lengths of axes,  how each tensor    what every      results, and
    traced step      values of shapes  is distributed     replica runs    new values of
                                                                          variables

`local_step.py` runs the whole of it. First it plans: `program.py`, `facts.py` (with `lengths.py`,
`values.py` and `list_elements.py`), `planner.py`, whose result is a `Planned`, `gathering.py` and
`cost.py`, which counts exchanges and arithmetic. Then it emits: `splitter.py`, `operations.py` and
`conversions.py`. `axes.py` says which axes of an operation's inputs become which of its results,
`families.py` which operations behave alike, and `rules/` what an operation may do with rows and
open sums; the tests check each rule by numbers. `layouts.py` and `sizes.py` define the terms.
`replica.py` is what one replica knows of its own rows, `randomness.py` draws its rows of random
numbers, and `moments.py` takes a mean and a variance with one sum.
"""
