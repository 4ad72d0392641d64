"""Images that are mixed with others of their batch.

mixing    pairs and shares       targets   what becomes of labels
"""
