"""`NaNGuard`: steps that are not finite are found, and undone.

callback ───> probe ───> findings
in the step   which layer, example  what to go back to
"""
