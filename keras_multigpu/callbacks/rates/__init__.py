"""Learning rates that callbacks change together.

rates ───> probe
"""
