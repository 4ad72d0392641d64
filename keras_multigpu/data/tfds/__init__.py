"""TFDS builders.

preparation    downloads and prepares, once for all processes
features       which features become inputs and targets
tfds_records   with random access; `tfds_stream` without
"""
