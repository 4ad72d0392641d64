"""Samples of each operation that has a rule, in files by kind."""

from samples import (  # noqa: F401 (each adds its samples)
    elementwise,
    examples,
    indices,
    lists,
    products,
    reductions,
    shapes,
)
