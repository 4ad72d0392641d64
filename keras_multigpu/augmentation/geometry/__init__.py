"""Where pixels go.

geometry_arguments ───> affine, windows ───> resampling
"""
