"""`LearningRateFinder`: losses over a range of rates."""
