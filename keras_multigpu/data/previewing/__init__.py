"""`Batches.preview`: what training will see.

preview   which examples      labels   what they are called
"""
