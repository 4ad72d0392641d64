"""The environment -> `Cluster` and `Settings`: all workers, this one's index, and timeouts.

TensorFlow, Kubeflow's TFJob, Ray and `keras-multigpu launch` use TF_CONFIG. TensorFlow's own
`TFConfigClusterResolver` accepts duplicate addresses, an address with a scheme, two chiefs, and a
task that no list has, for which the others then wait.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from keras_multigpu.checks import shorten, value_error

CHIEFS = ("chief", "master")
"""The roles of a first worker with a role of its own; Kubeflow has both."""

EVALUATOR = "evaluator"
"""The role of a process that evaluates beside the training and has no address."""

LAST_PORT = 65_535

LONGEST = 2_000
"""How many characters of TF_CONFIG an error message shows."""

EXAMPLE = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'


def place_of(address: str) -> tuple[str, int]:
    """Split `host:port` or `[::1]:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def name_of(workers: Sequence[str], index: int) -> str:
    return f"worker {index} ({workers[index]})"


@dataclass(frozen=True)
class Cluster:
    """The addresses of workers that train together, the chief's first, and this one's index."""

    workers: tuple[str, ...]
    index: int


@dataclass(frozen=True)
class TFConfig:
    """The addresses of each role, such as `"ps"`, and this process's role and index."""

    addresses: dict[str, tuple[str, ...]]
    role: str
    index: int

    @property
    def cluster(self) -> Cluster | None:
        if self.role not in (*CHIEFS, "worker"):
            return None
        chiefs = [address for role in CHIEFS for address in self.addresses.get(role, ())]
        first = len(chiefs) if self.role == "worker" else 0
        return Cluster((*chiefs, *self.addresses.get("worker", ())), first + self.index)


def tf_config() -> TFConfig | None:
    """Parse and check TF_CONFIG; None if it is not set or names no cluster."""
    text = os.environ.get("TF_CONFIG") or "{}"
    try:
        config = json.loads(text)
    # Also of a number with thousands of digits.
    except (ValueError, RecursionError) as error:
        raise _error(f"is not JSON that can be read ({error})", text) from error
    cluster = config.get("cluster", {}) if isinstance(config, dict) else None
    if not isinstance(cluster, dict):
        raise _error("has no object as its `cluster`", text)
    if not cluster:
        return None
    addresses = {role: _addresses(role, those, text) for role, those in cluster.items()}
    if len(set().union(*addresses.values())) < sum(map(len, addresses.values())):
        raise _error("names an address twice", text)
    if sum(len(addresses.get(role, ())) for role in CHIEFS) > 1:
        raise _error("names more than one chief", text)
    return TFConfig(addresses, *_task(config.get("task"), addresses, text))


def _addresses(role: str, addresses: Any, text: str) -> tuple[str, ...]:
    if isinstance(addresses, dict):
        raise _error(
            f"names some processes of {role!r} only, as with TFJob's `enableDynamicWorker`", text
        )
    if not isinstance(addresses, list):
        raise _error(f"has no list of addresses for {role!r}", text)
    for address in addresses:
        match = re.fullmatch(r"[^\s/]+:([0-9]{1,9})", address) if isinstance(address, str) else None
        if match is None or not 0 < int(match[1]) <= LAST_PORT:
            raise _error(
                f"names {shorten(address, 80)}, which is not `host:port` (1 to {LAST_PORT})", text
            )
    return tuple(addresses)


def _task(task: Any, addresses: dict[str, tuple[str, ...]], text: str) -> tuple[str, int]:
    role = task.get("type") if isinstance(task, dict) else None
    index = task.get("index") if isinstance(task, dict) else None
    # Shell scripts write a number as text.
    if isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index):
        index = int(index)
    if not isinstance(role, str) or isinstance(index, bool) or not isinstance(index, int):
        raise _error("does not say with `type` and `index` which `task` this process is", text)
    if role != EVALUATOR and not 0 <= index < len(addresses.get(role, ())):
        raise _error(f"has no {role!r} number {index} in its `cluster`", text)
    return role, index


def _error(what: str, text: str) -> ValueError:
    return value_error(
        f"The environment variable TF_CONFIG {what}.",
        f"Expected JSON such as {EXAMPLE}.",
        "Correct TF_CONFIG, or unset it to use this machine alone.",
        TF_CONFIG=text if len(text) <= LONGEST else f"{text[:LONGEST]}...",
    )


class Settings(NamedTuple):
    """Settings of a cluster.

    Attributes:
        heartbeat_timeout: Seconds without a sign of life after which a worker counts as lost.
        exchange_timeout: Seconds that a worker waits for all others to come to an exchange. It
            must exceed whatever only one worker does in between.
        cpu_devices: How many logical devices a worker without GPUs has.
    """

    heartbeat_timeout: int = 10
    exchange_timeout: int = 600
    cpu_devices: int = 1


def settings() -> Settings:
    """The settings in the variables `KERAS_MULTIGPU_HEARTBEAT_TIMEOUT` and so on."""
    return Settings(**{name: _number(name, usual) for name, usual in Settings()._asdict().items()})


def _number(setting: str, usual: int) -> int:
    name = f"KERAS_MULTIGPU_{setting.upper()}"
    text = os.environ.get(name, str(usual))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) == 0:
        raise value_error(
            f"The environment variable {name} is not a positive whole number.",
            f"Expected for example {usual}.",
            **{name: text},
        )
    return int(text)
