"""`BatchSizeFinder`: the largest batch that fits into memory."""
