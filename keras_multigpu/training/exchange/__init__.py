"""What travels between replicas.

exchange  sums and gathers over all replicas, by TensorFlow's collectives or another transport
packing   many small tensors become few packs, which start while others are computed
sums      sums of a step: marked while it is traced, packed when it runs
cuts      what runs before and after a sum, and which sums are gradients
stage     what a replica computes between two sums
stages    a function with sums in its middle, traced once for all replicas
"""
