"""Moves of an image's pixels.

random_geometry ───> windows, affine, resampling
"""
