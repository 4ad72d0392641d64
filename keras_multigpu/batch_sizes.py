"""How replicas share a global batch: arithmetic only, without TensorFlow.

`global_batch_size` is the number of examples in one optimizer step, `replica_batch_size` one
replica's share. Shares are contiguous, in replica order, and differ by at most one example:

    shares(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    shares(2, 4)  == [(0, 1), (1, 2), (2, 2), (2, 2)]
"""


def share_bounds(global_batch_size, replica, replicas):  # type: ignore[no-untyped-def]
    """The index of the first example in a replica's share, and the one after its last.

    The arguments are integers, or integer tensors if the batch size is known only in the step.
    """
    share, rest = global_batch_size // replicas, global_batch_size % replicas
    return (
        replica * share + smaller(replica, rest),
        (replica + 1) * share + smaller(replica + 1, rest),
    )


def smaller(first, second):  # type: ignore[no-untyped-def]
    """The smaller of two integers or integer tensors."""
    return (first + second - abs(first - second)) // 2


def shares(global_batch_size: int, replicas: int) -> list[tuple[int, int]]:
    """Every replica's `(start, stop)` in a batch of known size."""
    return [share_bounds(global_batch_size, r, replicas) for r in range(replicas)]
