"""One or several samples of each operation that has a rule; the files are those of the rules."""

from samples import (  # noqa: F401 (each adds its samples)
    elementwise,
    examples,
    lists,
    places,
    products,
    reductions,
    shapes,
)
