"""`BatchSizeScaling`: batches that grow, and the rate that follows."""
