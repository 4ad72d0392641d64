"""TFDS builders.

preparation   downloads and prepares, once for all processes
features      what a builder's examples have
records       with random access; `stream` without
"""
