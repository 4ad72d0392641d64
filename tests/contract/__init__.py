"""`fit`, `evaluate`, `predict`, the `*_on_batch` methods and saving keep Keras's contract.

What plain Keras returns on one device is the expectation; 2 replicas must return the same.
"""
