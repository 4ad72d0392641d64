"""`Runner`: runs a step on batches. Where replicas live, nothing above it knows."""

from collections.abc import Iterable, Sequence
from typing import Any

from keras_multigpu.partition.program import Operation
from keras_multigpu.training.replica_group import Copies
from keras_multigpu.training.shares import Rows
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.variables.open_sums import OpenSums
from keras_multigpu.training.watching.progress import Progress


class Runner:
    """Runs a step.

    Attributes:
        open_sums: The open sums that steps of the model may have left in variables.
        step: The step in parts, if it is known before a batch comes.
        unsplit_because: Why one replica takes the whole batch, if it does.
        progress: To which sum its replicas have come, if it counts them.
        is_checked: Whether it may run; a training step is tried first.
    """

    open_sums: OpenSums | None = None
    step: PartitionedStep | None = None
    unsplit_because: object = None
    progress: Progress | None = None
    is_checked = True

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Run the step on a batch; its results, as one device gives them.

        Without `run_eagerly` it is traced into a graph, once for each form of batch.
        """
        raise NotImplementedError

    @property
    def waiting(self) -> list[Copies]:
        """The copies of the variables in which it may leave open sums."""
        return []

    @property
    def copies(self) -> Iterable[Copies]:
        """The copies of each variable that it may change, on the replicas of this process."""
        return [] if self.step is None else self.step.traced.copies

    @property
    def operations(self) -> Iterable[Operation]:
        """The operations of the step as one device runs it."""
        return [] if self.step is None else self.step.program.all_operations()
