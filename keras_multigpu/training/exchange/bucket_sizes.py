"""How many bytes travel together, for whoever packs them or predicts how long that takes.

    40 MiB of gradients, from the last layer to the first    [  20  ][ 10 ][ 5 ][2.5][1.3][1.2]

Each sum costs something, so buckets are large; but all wait for the sum that begins last, when the
backward pass is over and nothing is left to hide it, so the last ones are small.
"""

# As PyTorch's DistributedDataParallel has them for GPUs, where a copy costs next to nothing. On two
# CPU replicas 1 MiB takes less processor time, 0.77 of one bucket where 25 MiB takes 0.93; no run
# on GPUs has compared sizes yet.
BUCKET = 25 * 2**20
"""So many bytes fill any bucket."""

# So many bytes are worth a sum.
SMALLEST = 2**20

# A tensor of so many bytes travels alone: to copy it into a bucket costs more than another sum.
LARGE = 4 * 2**20


def filling(left: float) -> float:
    """How many bytes fill the next bucket, when it and those after it hold so many."""
    # Two workers at 200 Mbit/s take 466 ms a step with these, 521 ms with buckets of 25 MiB alone.
    return min(BUCKET, max(SMALLEST, left / 2))
