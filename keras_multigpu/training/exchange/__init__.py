"""What travels between replicas.

packing   many small tensors become few packs, which start while others are computed
sums      sums over replicas, packed
cuts      what runs before and after a sum, and which sums are gradients
stage     what a replica computes between two sums
stages    a function with sums in its middle, traced once for all replicas
"""
