"""Layers of Keras and keras-cv, and functions, as layers of this package.

adapters        what each becomes       wrapped_layer   what they have in common
"""
