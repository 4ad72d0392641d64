"""TFDS builders.

preparation    downloads and prepares data, once for all processes
features       selects inputs and targets
tfds_records   reads data with random access; `tfds_stream` other data
"""
