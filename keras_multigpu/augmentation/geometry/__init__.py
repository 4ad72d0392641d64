"""Where pixels go.

arguments ───> affine, windows, shifts ───> resampling
"""
