"""Where blocks of rows begin and end: what may be cut from them, and added at their ends."""

from keras_multigpu.partition.layouts import Block, Rows
from keras_multigpu.partition.plan import Facts
from keras_multigpu.partition.sizes import AnySize, quotient

Blocks = tuple[Block, ...]

# Blocks of a layout: conversions take time for each.
MANY = 64


def cut(facts: Facts, blocks: Blocks, begin: AnySize, end: AnySize) -> tuple[Blocks, Blocks] | None:
    """The blocks before `begin`, and those from there to `end`; None if a block would be cut."""
    edges = [facts.length(blocks[:count]) for count in range(len(blocks) + 1)]
    if begin not in edges or end not in edges:
        return None
    first, last = edges.index(begin), edges.index(end)
    return (blocks[:first], blocks[first:last]) if first <= last else None


def as_blocks(facts: Facts, length: AnySize | None, rows: Rows) -> Blocks | None:
    """Blocks of the same batch that have this length; None if it isn't a multiple of theirs."""
    if length is None:
        return None
    if isinstance(length, int) and length == 0:
        return ()
    factor = quotient(length, facts.length((Block(rows.blocks[0].batch),)))
    if factor is None or (isinstance(factor, int) and factor < 1):
        return None
    return (Block(rows.blocks[0].batch, factor),)


def between(
    facts: Facts, before: AnySize, rows: Rows, after: AnySize
) -> tuple[Blocks, Rows] | None:
    """The blocks of what is put before rows, and those rows with what is put before and after."""
    first, last = as_blocks(facts, before, rows), as_blocks(facts, after, rows)
    if first is None or last is None:
        return None
    return first, Rows(rows.axis, (*first, *rows.blocks, *last))


def repeated(rows: Rows, times: int) -> Rows | None:
    """The same rows several times, one after another."""
    count = len(rows.blocks) * times
    return Rows(rows.axis, rows.blocks * times) if 0 < count <= MANY else None


def once(rows: Rows, times: int) -> Rows | None:
    """The rows whose repetition these are."""
    count, rest = divmod(len(rows.blocks), times)
    found = Rows(rows.axis, rows.blocks[:count])
    return found if not rest and found.blocks * times == rows.blocks else None
