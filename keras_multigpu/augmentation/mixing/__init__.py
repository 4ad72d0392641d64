"""Layers that mix each image with its neighbour in the batch.

mixing    the layers, and what happens to pixels
labels    what happens to labels and sample weights
"""
