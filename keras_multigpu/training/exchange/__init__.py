"""What travels between replicas.

gradients   which sums these are, where they travel in fewer bytes
packing     many small tensors become few sums, which start while others are computed
stages      a function with sums in its middle, traced once for all replicas
"""
