"""The largest size that fits, in few tries: doubled until one does not, then halved between."""

from collections.abc import Callable


def largest_size(
    fits: Callable[[int], bool], minimum: int, maximum: int | None, slack: float = 0.0
) -> tuple[int | None, int | None]:
    """The largest size that fits, and the smallest that was seen not to.

        largest_size(lambda size: size <= 11, 1, None)    tries 1 2 4 8 16 12 10 11
        (11, 12)

    Args:
        fits: Whether a size fits. If one does, all smaller ones do.
        maximum: The largest size to try; None for any.
    """
    good, bad, size = None, None, minimum
    while bad is None:
        if fits(size):
            good = size
            if size == maximum:
                return good, None
            size = 2 * size if maximum is None else min(2 * size, maximum)
        else:
            bad = size
    while good is not None and bad - good > max(1, slack * good):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad
