"""The blocks of an axis in rows: cutting it at their ends, and adding others before and after."""

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.layouts import Block, Rows
from keras_multigpu.partition.sizes import AnySize, quotient

Blocks = tuple[Block, ...]

# A layout has at most this many blocks: a conversion takes time for each.
MOST_BLOCKS = 64


def cut(facts: Facts, blocks: Blocks, begin: AnySize, end: AnySize) -> tuple[Blocks, Blocks] | None:
    """The blocks before `begin`, and those from `begin` to `end`.

    None if there are none between these, or if one of these is inside a block.
    """
    edges = [facts.length(blocks[:count]) for count in range(len(blocks) + 1)]
    if begin not in edges or end not in edges:
        return None
    first, last = edges.index(begin), edges.index(end)
    return (blocks[:first], blocks[first:last]) if first < last else None


def as_blocks(facts: Facts, length: AnySize | None, rows: Rows) -> Blocks | None:
    """Blocks of the same batch that have this length; None if it isn't a multiple of theirs."""
    if length is None:
        return None
    if length == 0:
        return ()
    batch = rows.blocks[0].batch
    factor = quotient(length, facts.length((Block(batch),)))
    if factor is None or (isinstance(factor, int) and factor < 1):
        return None
    return (Block(batch, factor),)


def padded(facts: Facts, before: AnySize, rows: Rows, after: AnySize) -> tuple[Blocks, Rows] | None:
    """The blocks that padding before the rows makes, and the padded rows."""
    first, last = as_blocks(facts, before, rows), as_blocks(facts, after, rows)
    if first is None or last is None:
        return None
    return first, Rows(rows.axis, (*first, *rows.blocks, *last))


def repeat(rows: Rows, times: int) -> Rows | None:
    """The same rows several times, one after another."""
    count = len(rows.blocks) * times
    return Rows(rows.axis, rows.blocks * times) if 0 < count <= MOST_BLOCKS else None


def undo_repeat(rows: Rows, times: int) -> Rows | None:
    """The rows that were repeated; None if these are not a repetition."""
    count, rest = divmod(len(rows.blocks), times)
    found = Rows(rows.axis, rows.blocks[:count])
    return found if not rest and found.blocks * times == rows.blocks else None
