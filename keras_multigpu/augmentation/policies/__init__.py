"""Policies, which change images by operations with names and magnitudes.

rand_augment ───> policy ───> operations
"""
