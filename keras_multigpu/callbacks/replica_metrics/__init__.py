"""`ReplicaMetrics`: what each replica does.

callback ───> scores ───> window ───> row_file, figure
"""
