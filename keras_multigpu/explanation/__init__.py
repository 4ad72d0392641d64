"""How replicas share a model's step, in words and figures.

explain            plans the step for any number of replicas, and prints how they share it
explanation        the result, as a table
"""
