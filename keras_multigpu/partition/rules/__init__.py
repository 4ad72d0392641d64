"""The rules: how operations work where their inputs lie in rows, or are sums still to come.

    sums         what passes a sum on
    elementwise  rows of the result are those of the inputs
    reductions   along some axes; and what works for each entry of the others
    products     of matrices
    examples     one result for each entry of the first axis
    shapes       what moves entries, or counts them
    strided      slices as Python writes them
    places       what takes entries from places, or puts them there
    lists        of tensors

Importing this enters them all into `plan.RULES`.
"""

from keras_multigpu.partition.plan import RULES
from keras_multigpu.partition.rules import (
    elementwise,
    examples,
    lists,
    places,
    products,
    reductions,
    shapes,
    strided,
)

FAILS_EMPTY: set[str] = set()
"""Operations that fail, or are wrong, where a replica has no rows."""

lists.for_lists_too("Identity", "ZerosLike", "AddN")

__all__ = ["FAILS_EMPTY", "RULES"]
