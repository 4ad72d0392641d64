"""Sources that can only be read from front to end.

stream, order     batches of one, through a shuffle buffer
cache             how its examples are kept
python_batches    generators and Keras's own batches
"""
