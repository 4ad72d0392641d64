"""What travels between replicas.

packing            many small tensors become few sums, which start while others are computed
sparse_gradients   rows of an embedding's table
stages             a function with sums in its middle, traced once for all replicas
"""
