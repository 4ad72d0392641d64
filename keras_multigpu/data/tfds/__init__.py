"""TFDS builders.

preparation  downloads and prepares data, once for all processes
features     selects inputs and targets
splits       reads a split, with random access or as a stream
"""
