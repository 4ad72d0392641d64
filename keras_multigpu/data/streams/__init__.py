"""Sources that can only be read from front to end.

stream          their batches, and a cache in memory
shuffling       a shuffle buffer
python_batches  generators and Keras's own batches
"""
