"""Sources that can only be read from front to end.

stream            their batches          shuffling        a shuffle buffer
cached_stream     kept in memory         python_batches   generators and Keras's own batches
"""
