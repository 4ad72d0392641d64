"""`NaNGuard`: steps that are not finite are found and not applied."""
