"""Decides how replicas share a step, before anything is emitted.

`planner.py` makes a `Planned` of a program, and `planned.py` says when a sum stays open.
`gathering.py` decides when weights in parts are gathered, `accumulation.py` which sums wait for an
update. `part.py` lists what a replica then runs, and `cost.py` counts its bytes and arithmetic.
"""
