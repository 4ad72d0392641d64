"""Layers of Keras and keras-cv, and plain functions, as layers of this package.

keras_cv_layer ───> keras_layer, function ───> wrapped_layer
"""
