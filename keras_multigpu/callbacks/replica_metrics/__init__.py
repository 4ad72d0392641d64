"""`ReplicaMetrics`: what each replica does.

callback ───> scores ───> events, row_files (above), figure
"""
