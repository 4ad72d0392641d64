"""What the workers of one training decide together about its checkpoints.

Only the chief writes. All go on from the checkpoint that the chief has found, and all save and end
behind the same step, though a signal reaches each of them at another moment, or only one.
"""

import time
from typing import Any

from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder, number_of
from keras_multigpu.training.replica_group import ReplicaGroup

SECONDS = 1.0
"""So often the workers ask each other whether there is anything to do."""

# Steps can become slower after they were counted, and then nobody waits for more of them.
MOST_STEPS = 1000


class Together:
    """The decisions that all workers of one `fit` take."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self.is_chief = group.is_chief
        self.is_spread = group.is_spread
        self._wait = self._done = 0
        self._asked_at = time.monotonic()

    def newest(self, files: CheckpointFolder) -> tuple[Any, Any]:
        """The newest whole checkpoint of the chief's folder, and what is in it."""
        found = files.newest() if self.is_chief else None
        if not self.is_spread:
            return found or (None, None)
        number = number_of(found[0]) if found else -1
        ((chiefs,), *_) = self._group.of_processes([number])
        if self.is_chief or chiefs < 0:
            return found or (None, None)
        return files.read(chiefs)

    def asked(self, signal: int | None, is_due: bool, now: bool = False) -> tuple[int | None, bool]:
        """Which signal has reached any worker, and whether the chief's clock says "save"."""
        if not self.is_spread:
            return signal, is_due
        self._done += 1
        # Workers ask each other once a second, after as many steps as the chief says: an exchange
        # in each step would slow all of them.
        if self._done < self._wait and not now:
            return None, False
        seconds = max(time.monotonic() - self._asked_at, 1e-6)
        wait = min(max(int(self._done / seconds * SECONDS), 1), MOST_STEPS)
        rows = self._group.of_processes([signal or 0, int(is_due), wait])
        self._done, self._asked_at, self._wait = 0, time.monotonic(), rows[0][2]
        return max(row[0] for row in rows) or None, bool(rows[0][1])

    def wait(self) -> None:
        """Wait for the others, so that none ends while the chief still writes."""
        if self.is_spread:
            self._group.agree(False)
