"""`GradientNoiseScale`: which batch size still pays."""
