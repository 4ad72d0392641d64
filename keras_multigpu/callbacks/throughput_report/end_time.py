"""When training will end, if its epochs go on taking as long as they do."""

import time
from collections.abc import Callable


class EndTime:
    """Estimates the end of a `fit` from the epochs that it has done, validation included.

    Args:
        clock: The time of day, in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begun = 0
        self._since = 0.0
        self._skipped = 0

    def begin_epoch(self, step: int) -> None:
        """An epoch begins, of which a resumed run has done some steps before."""
        self._begun += 1
        # The first epoch compiles, and may be the rest of one: it counts only until another is
        # over.
        if self._begun <= 2:
            self._since, self._skipped = self._clock(), step

    def after(self, step: int, epochs_left: int) -> float | None:
        """The time of the end, now that an epoch of so many steps is over; None if unknown."""
        done = max(self._begun - 1, 1) - (self._skipped / step if step else 1)
        if done <= 0:
            # Everything but its end had been done before.
            self._begun = 0
            return None
        now = self._clock()
        return now + epochs_left * (now - self._since) / done


def time_of_day(end: float, now: float) -> str:
    """A time as `14:10`, with the date if that is not today's."""
    day, today = (time.strftime("%Y-%m-%d", time.localtime(each)) for each in (end, now))
    return time.strftime("%H:%M" if day == today else "%Y-%m-%d %H:%M", time.localtime(end))
