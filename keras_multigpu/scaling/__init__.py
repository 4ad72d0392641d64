"""`keras-multigpu scale`: how a user's own script scales with the number of replicas.

turn       a process that runs the script, measures its first `fit`, and ends there
report     the medians of all turns: efficiency, the first limit, table and picture
"""
