"""`ReplicaMetrics`: what each replica does.

replica_metrics ───> scores ───> window ───> row_file
"""
