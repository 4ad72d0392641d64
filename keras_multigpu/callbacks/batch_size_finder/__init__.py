"""`BatchSizeFinder`: the largest batch that fits.

callback ───> search ───> out_of_memory        figure
"""
