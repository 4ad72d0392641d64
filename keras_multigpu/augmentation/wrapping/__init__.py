"""Layers of others, in ours.

adapters        what each becomes       wrapped_layer   what they have in common
"""
