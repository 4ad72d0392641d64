"""Which colors pixels get.

matrices             brightness, contrast, saturation as one product
hue_and_saturation   what is not a matrix
"""
