"""`LearningRateWarmup`: a rate that rises from the first step."""
