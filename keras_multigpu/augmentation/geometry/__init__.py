"""Moves of an image's pixels.

random_geometry ───> affine, resampling
"""
