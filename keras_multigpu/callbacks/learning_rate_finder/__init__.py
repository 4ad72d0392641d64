"""`LearningRateFinder`: losses over a range of rates.

callback ───> curve ───> figure
"""
