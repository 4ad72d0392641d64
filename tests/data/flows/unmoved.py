"""The parameters of a flow's image that is not moved."""

IDENTITY = {
    "theta": 0.0,
    "tx": 0.0,
    "ty": 0.0,
    "shear": 0.0,
    "zx": 1.0,
    "zy": 1.0,
    "flip_horizontal": 0.0,
    "flip_vertical": 0.0,
}
