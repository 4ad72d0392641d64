"""`BatchSizeFinder`: the largest batch that fits.

callback ───> search, largest_size ───> out_of_memory        figure
"""
