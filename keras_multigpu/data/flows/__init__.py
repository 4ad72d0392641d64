"""`ImageDataGenerator` flows, pixel for pixel.

sources ───> parameters ───> loading ───> transforms
drawn           files        warped and colored
targets      labels of each class mode
"""
