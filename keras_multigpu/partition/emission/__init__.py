"""Adds what one replica runs to its graph, by the plans of the step.

`splitter.py` walks the planned program: variables, loops and conditions. `operations.py` adds one
operation, `conversions.py` changes layouts, and `exchange.py` says what it asks of the replicas.
"""
