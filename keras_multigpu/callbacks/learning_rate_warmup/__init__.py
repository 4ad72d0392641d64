"""`LearningRateWarmup`: a rate that rises from the first step.

callback ───> probe
              multiplies the rate, inside each step
"""
