"""`EvaluationAveraging`: one set of BatchNorm statistics for all replicas, in Keras's own `fit`."""
