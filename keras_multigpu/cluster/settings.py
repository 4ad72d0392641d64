"""The environment -> how long workers wait for each other, and what devices they have."""

import os
import re
from typing import NamedTuple

from keras_multigpu.checks import value_error


class Settings(NamedTuple):
    """What the environment says of a cluster besides its workers.

    Attributes:
        heartbeat_timeout: `KERAS_MULTIGPU_HEARTBEAT_TIMEOUT`: seconds without a sign of life
            after which a worker counts as lost.
        exchange_timeout: `KERAS_MULTIGPU_EXCHANGE_TIMEOUT`: seconds that a worker waits
            until all have come to an exchange. More than the slowest thing that only one does.
        cpu_devices: `KERAS_MULTIGPU_CPU_DEVICES`: how many logical devices a worker without GPUs
            has.
    """

    heartbeat_timeout: int = 10
    exchange_timeout: int = 600
    cpu_devices: int = 1


def settings() -> Settings:
    """What the environment says; a `ValueError` if a variable is not a positive whole number."""
    return Settings(**{name: _number(name, usual) for name, usual in Settings()._asdict().items()})


def _number(setting: str, usual: int) -> int:
    name = f"KERAS_MULTIGPU_{setting.upper()}"
    text = os.environ.get(name, str(usual))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) == 0:
        raise value_error(
            f"The environment variable {name} is not a positive whole number.",
            f"Expected for example {usual}.",
            "Correct it, or unset it.",
            **{name: text},
        )
    return int(text)
