"""Splits the graph of one device's step over replicas. It knows graphs, but nothing of Keras.

    program ───────> facts ──────────> plans ───────────> local graph ──> outcome
    one device's     lengths of axes,  how each tensor    what every      results, and
    traced step      values of shapes  is distributed     replica runs    new values of
                                                                          variables

`local_step.py` runs the whole of it, each room after the one before:

    facts/     what is known of a program before it runs
    rules/     what an operation may do with rows and open sums; the tests check each by numbers
    planning/  asks the rules: a layout for each tensor, a plan for each operation, and their cost
    emission/  adds what one replica runs to its graph, by these plans

`program.py`, `layouts.py` and `sizes.py` define the terms. `replica.py` is what one replica knows
of its own rows, and `source_line.py` finds the line of code that made an operation.
"""
