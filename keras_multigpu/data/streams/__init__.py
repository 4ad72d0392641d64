"""Sources that can only be read from front to end.

stream          their batches, a shuffle buffer, and a cache in memory
python_batches  generators and Keras's own batches
"""
