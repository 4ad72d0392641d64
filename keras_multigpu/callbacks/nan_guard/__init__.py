"""`NaNGuard`: steps that are not finite are found and not applied.

nan_guard ───> probe ───────> findings
what follows   in the step    in words
"""
