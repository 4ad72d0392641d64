"""Learning rates that callbacks change together.

rates ───> probe, momentum_correction
"""
