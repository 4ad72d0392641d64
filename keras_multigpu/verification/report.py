"""`Report`: how training on one number of replicas compared with one device."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Report:
    """How training on N replicas compared with one device.

    Args:
        replicas: The number of replicas.
        loss_on_one_device: The logged loss of the last step; None if nothing was logged.
        loss_on_replicas: The same on the replicas; None also if they crashed.
        largest_difference: The largest difference of a weight or optimizer variable after
            the last step, relative to its largest value. It distinguishes rounding from errors.
        first_difference: The first weight, in the model's order, that differs by more than
            rounding; None if all agree.
        step: The step after which it differed, or in which the replicas crashed; the first is 1.
        error: What the replicas raised; None if they trained to the end.
        remark: What to know about a difference or a crash.
        parts: What replicas gather and compute whole, in one line; None if they share everything.
    """

    replicas: int
    loss_on_one_device: float | None = None
    loss_on_replicas: float | None = None
    largest_difference: float | None = None
    first_difference: str | None = None
    step: int | None = None
    error: str | None = None
    remark: str | None = None
    parts: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether the replicas trained as one device."""
        return self.first_difference is None and self.error is None
