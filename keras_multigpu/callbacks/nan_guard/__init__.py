"""`NaNGuard`: steps that are not finite are found, and undone.

callback ───> probe ───> findings                 good_state
in the step   which layer, example  what to go back to
"""
