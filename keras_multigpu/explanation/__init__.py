"""How replicas share a model's step, in words and figures: what `kmg.explain` says.

explain            plans the step for any number of replicas, and has it described
explanation        what was found, as a table
"""
