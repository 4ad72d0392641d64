"""How one global batch is shared by replicas: arithmetic only, no TensorFlow.

`global_batch_size` is the number of examples of one optimizer step,
`replica_batch_size` one replica's share of it. Shares are contiguous, in replica
order, and differ by at most one example, so that the shares joined are the
global batch again:

    shares(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    shares(2, 4)  == [(0, 1), (1, 2), (2, 2), (2, 2)]
"""


def share_bounds(global_batch_size, replica, replicas):  # type: ignore[no-untyped-def]
    """The first index of a replica's share and the one after its last."""
    # Works on integers and on integer tensors alike, because the size of a batch is often known
    # only when the step runs.
    share, rest = global_batch_size // replicas, global_batch_size % replicas
    return (
        replica * share + smaller(replica, rest),
        (replica + 1) * share + smaller(replica + 1, rest),
    )


def smaller(first, second):  # type: ignore[no-untyped-def]
    """The smaller of two integers or scalar integer tensors."""
    if isinstance(first, int) and isinstance(second, int):
        return min(first, second)
    # Written as arithmetic so that this module needs no TensorFlow.
    return (first + second - abs(first - second)) // 2


def shares(global_batch_size: int, replicas: int) -> list[tuple[int, int]]:
    """Every replica's `(start, stop)` in a batch of known size."""
    return [share_bounds(global_batch_size, r, replicas) for r in range(replicas)]
