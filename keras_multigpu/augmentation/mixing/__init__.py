"""Images that are mixed with others of their batch.

mixing   pairs and how much of each       mixed_targets   their labels and weights
"""
