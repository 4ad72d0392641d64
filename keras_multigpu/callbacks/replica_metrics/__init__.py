"""`ReplicaMetrics`: what each replica does.

callback ───> scores ───> row_file, figure
"""
