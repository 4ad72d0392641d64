"""The keyword arguments that all sources share, and their checks."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

import numpy as np

from keras_multigpu.checks import require_choice, require_positive_integer, type_error, value_error
from keras_multigpu.data.pipeline.order import Part, Plan
from keras_multigpu.data.pipeline.source import Source, Stream

Taker = TypeVar("Taker", bound=Callable[..., Any])

REPLICA_BATCH_SIZE = 32
"""The default if neither batch size is given."""


class Batching(TypedDict, total=False):
    """The keyword arguments that all `from_*` functions share; `Batches` explains them."""

    global_batch_size: int | None
    replica_batch_size: int | None
    shuffle: bool
    seed: int
    remainder: Literal["keep", "drop"]
    augment: Any
    cache: str | Path | None
    balance: Literal["class_weight", "oversample"] | None
    on_error: Literal["raise", "skip"]


DEFAULTS = Batching(
    global_batch_size=None,
    replica_batch_size=None,
    shuffle=True,
    seed=0,
    remainder="keep",
    augment=None,
    cache=None,
    balance=None,
    on_error="raise",
)

CHANGEABLE = ("global_batch_size", "replica_batch_size", "cache", "on_error")
"""Settings that do not affect the examples or their order. `fit` itself checks the batch size."""


def require_known(settings: Mapping[str, Any]) -> None:
    """Raise a `TypeError` for unknown arguments."""
    for name, value in settings.items():
        if name == "batch_size":
            raise type_error(
                "`batch_size` does not say whose batch it is.",
                "Expected `global_batch_size` (one optimizer step, what Keras means), or "
                "`replica_batch_size` (one replica's part of it).",
                f"Write global_batch_size={value!r}.",
                batch_size=value,
            )
        if name not in DEFAULTS:
            raise type_error(
                f"`{name}` is not an argument of `Batches`.",
                f"Expected some of {', '.join(DEFAULTS)}.",
                **{name: value},
            )


def fill_defaults(settings: Mapping[str, Any]) -> Batching:
    require_known(settings)
    # A checkpoint stores them as JSON, which takes no NumPy integers.
    plain = {
        name: int(value) if isinstance(value, np.integer) else value
        for name, value in settings.items()
    }
    return {**DEFAULTS, **plain}  # type: ignore[typeddict-item]


def list_changes(settings: Batching) -> list[str]:
    """The settings that differ from their defaults as texts, without batch sizes."""
    return [
        f"{name}={show(value)}"
        for name, value in settings.items()
        if value != DEFAULTS[name] and not name.endswith("batch_size")  # type: ignore[literal-required]
    ]


def show(value: Any) -> str:
    """A setting as text, with layers and functions by name."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    return getattr(value, "__name__", type(value).__name__) if callable(value) else repr(value)


def require_valid(settings: Batching, source: Source | Stream) -> None:
    sizes = {name: settings[name] for name in ("global_batch_size", "replica_batch_size")}
    if None not in sizes.values():
        raise value_error(
            "Both `global_batch_size` and `replica_batch_size` were given.",
            "Expected one of them: the global batch, or a replica's part of it.",
            **sizes,
        )
    for name, size in sizes.items():
        if size is not None:
            require_positive_integer(name, size)
    require_choice("remainder", settings["remainder"], ("keep", "drop"))
    require_choice("balance", settings["balance"], (None, "class_weight", "oversample"))
    require_choice("on_error", settings["on_error"], ("raise", "skip"))
    require_choice("shuffle", settings["shuffle"], (True, False))
    if isinstance(settings["seed"], bool) or not isinstance(settings["seed"], int | np.integer):
        raise value_error(
            "`seed` is not an integer.",
            "Expected one integer, the same on all workers, that decides shuffles and draws.",
            seed=settings["seed"],
        )
    require_examples(source.name, source.num_examples)
    if isinstance(source, Source) and settings["balance"] is not None and source.labels is None:
        raise value_error(
            f"`balance` needs classes, and the examples of {source.name} have none.",
            "Expected one integer class for each example.",
            "Leave out `balance`, or pass integer labels.",
            balance=settings["balance"],
        )


def require_examples(name: str, count: int | None) -> None:
    if count == 0:
        raise value_error(
            f"There are no examples in {name}.",
            "Expected at least one.",
            num_examples=0,
        )


def require_batches(plan: Plan) -> None:
    if not plan.steps():
        raise value_error(
            f"{plan.order.length} examples do not fill one batch, and a smaller one is dropped.",
            f"Expected at least {plan.global_batch_size} examples.",
            'Use smaller batches, or remainder="keep".',
            remainder=plan.remainder,
            global_batch_size=plan.global_batch_size,
        )


def require_place(epoch: Any, start: Any, length: int | None) -> None:
    for name, value in (("epoch", epoch), ("start", start)):
        if not isinstance(value, int | np.integer) or value < 0:
            raise value_error(
                f"`{name}` is not a non-negative integer.",
                "Expected the number of an epoch, and how many of its examples to skip.",
                **{name: value},
            )
    if length is not None and start > length:
        raise value_error(
            f"`start` is past the end of the epoch, which has {length} examples.",
            "Expected at most the number of examples.",
            start=start,
        )


def parse_shard(shard: Any) -> Part:
    """The part `(i, n)` of batches; a `ValueError` for anything else."""
    valid = (
        isinstance(shard, tuple | list)
        and len(shard) == 2
        and all(isinstance(number, int | np.integer) for number in shard)
        and 0 <= shard[0] < shard[1]
    )
    if not valid:
        raise value_error(
            "`shard` is not a part of a batch.",
            "Expected (i, n) with 0 <= i < n.",
            shard=shard,
        )
    number, shards = map(int, shard)
    return Part(number, number + 1, shards)


def with_settings(taker: Taker) -> Taker:
    """Let `help` and notebooks list the settings that `**batching: Unpack[Batching]` stands for.

    Named parameters would reject Keras's `batch_size` without saying what to write instead.
    """
    types, signature = get_type_hints(Batching), inspect.signature(taker)
    *own, batching = signature.parameters.values()
    settings = [
        inspect.Parameter(name, batching.KEYWORD_ONLY, default=value, annotation=types[name])
        for name, value in DEFAULTS.items()
    ]
    taker.__signature__ = signature.replace(parameters=own + settings)  # type: ignore[attr-defined]
    return taker
