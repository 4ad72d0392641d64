"""`ReplicaMetrics`: what each replica does."""
