"""Trains one device and N replicas in lockstep, and finds what differs, and from which step on.

After each step, every weight and optimizer variable of every replica is compared with that of one
device. The measure is the largest difference, relative to the variable's largest value (or to a
hundredth of its layer's, if that is more: a bias whose gradient is only rounding tells nothing).
Correct runs differ by rounding, because N replicas add in another order. So a difference counts
only if it is

- larger than the tolerance: 2e-5 for a model that computes in float32, 2e-2 in float16 or
  bfloat16, which keep about three digits;
- much larger than the effect of changing the last bit of the initial weights on one device. Some
  models amplify rounding: a high learning rate does, or Adam on a gradient that is only rounding,
  such as that of a bias before BatchNormalization;
- and as large in float64. Where many terms nearly cancel, as in the gradient of a convolution's
  bias, one device's own rounding may exceed both limits, because a changed bit does not change the
  order of a sum.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import in_one_line, value_error
from keras_multigpu.explanation.explain import explain_trained
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.training.shares import Batch
from keras_multigpu.verification.batches import number_of_examples
from keras_multigpu.verification.participants import Participant, Recipe, Value, value_of
from keras_multigpu.verification.verification import Report, join_words

# float32 has 24 bits, so one rounding is at most 6e-8; reordered sums over a dozen steps make
# hundreds of them.
TOLERANCE = 2e-5

# bfloat16 has 8 bits: one rounding is up to 4e-3.
HALF_PRECISION_TOLERANCE = 2e-2

# How many times the effect of one changed bit still counts as rounding.
ROUNDING_FACTOR = 30

# Rounding in float64 is 2e-9 times that in float32. Chaos may amplify it; an error does not shrink.
SHRINKS_TO = 1e-4

GROUP_FRACTION = 0.01
LOGGED_LOSS = "the logged loss"
BUG = (
    "replicas must not differ from one device: this is a bug in keras_multigpu. Please report it, "
    "with this table and the model, in the project's issue tracker."
)
ROUNDING = (
    "the difference, in {}, is rounding that this model amplifies: in float64 it all but "
    "disappears, or on one device a changed last bit of the initial weights makes one as large."
)
UNREPEATABLE = (
    "this training is not repeatable on one device either: the function returns a different model "
    "each time, or a random draw is not seeded. So there is nothing to compare with."
)


@dataclasses.dataclass
class Course:
    """How training differed from one device: one number for each name after each step."""

    participant: Participant
    names: list[list[str]] = dataclasses.field(default_factory=list)
    differences: list[list[float]] = dataclasses.field(default_factory=list)
    loss: float | None = None
    error: Exception | None = None

    def step(self, batch: Batch, loss: float | None, values: list[Value]) -> None:
        if self.error is not None:
            return
        try:
            self.loss = self.participant.train(batch)
        except Exception as error:  # Anything that the user's model raises is a result.
            self.error = error
            return
        self.names.append([*(value.name for value in values), LOGGED_LOSS])
        losses = [0.0 if value is None else value for value in (loss, self.loss)]
        self.differences.append(
            [*differences(values, self.participant.values()), relative_difference(*losses)]
        )


def compare(
    recipe: Recipe, batches: Sequence[Batch], strategies: dict[int, tf.distribute.Strategy]
) -> list[Report]:
    """Train on one device and under each strategy; return a report for each strategy."""
    reference = recipe.on_one_device()
    courses = {n: Course(recipe.on_replicas(strategy)) for n, strategy in strategies.items()}
    loss = run_in_lockstep(reference, list(courses.values()), batches)
    limits = Limits(recipe, batches, strategies)
    reports = [report(n, course, loss, limits) for n, course in courses.items()]
    # One remark for all, not a paragraph for each variable.
    remark = ROUNDING.format(join_words(limits.rounded)) if limits.rounded else None
    return [dataclasses.replace(r, remark=remark) if r.remark == ROUNDING else r for r in reports]


def run_in_lockstep(
    reference: Participant, courses: Sequence[Course], batches: Sequence[Batch]
) -> float | None:
    """Train all on each batch, one after the other; return the reference's last loss."""
    loss = None
    for step, batch in enumerate(batches, start=1):
        try:
            loss = reference.train(batch)
        except Exception as error:
            raise value_error(
                f"The model fails on one device already, in step {step}.",
                "Expected a model that trains there; N replicas are compared with it.",
                "Fix this error first. A batch size that is hard-coded in a layer, for example, "
                "does not fit a smaller last batch.",
                batch_size=number_of_examples(batch),
                error=in_one_line(error),
            ) from error
        values = reference.values()
        for course in courses:
            course.step(batch, loss, values)
    return loss


class Limits:
    """How large differences may be: the tolerance, or more where the model amplifies rounding."""

    def __init__(
        self,
        recipe: Recipe,
        batches: Sequence[Batch],
        strategies: dict[int, tf.distribute.Strategy],
    ) -> None:
        self._recipe = recipe
        self._batches = batches
        self._strategies = strategies
        self.batch_size = number_of_examples(batches[0])
        self.tolerance = tolerance(recipe.precision)
        # Whether one device repeats its own training; tested only after too large a difference.
        self.repeats = True
        # What differs by no more than rounding, but by more than the tolerance.
        self.rounded: list[str] = []

    def as_rounding(self, found: Report, where: str) -> Report:
        """A report that agrees, in which this variable differs most."""
        if where not in self.rounded:
            self.rounded.append(where)
        return dataclasses.replace(found, remark=ROUNDING)

    def exceeds(self, course: Course) -> tuple[int, str] | None:
        """The first step with too large a difference, and the name of what differs."""
        for step, numbers in enumerate(course.differences):
            for index, number in enumerate(numbers):
                # The second limit takes three more trainings, so it comes last. `not <=` also
                # catches NaN, which `>` would let pass.
                if not number <= self.tolerance and not number <= self._amplified[step][index]:
                    return step + 1, course.names[step][index]
        return None

    @functools.cached_property
    def _amplified(self) -> list[list[float]]:
        """The effect of a changed last bit in the initial weights on one device, with a margin."""
        changed, twin = (Course(self._recipe.on_one_device()) for _ in range(2))
        nudge(changed.participant.model, self._recipe.precision)
        run_in_lockstep(self._recipe.on_one_device(), [changed, twin], self._batches)
        # If even equal models differ, the cause is not rounding.
        self.repeats = max(map(max, twin.differences)) <= self.tolerance
        factor = ROUNDING_FACTOR if self.repeats else 0
        return [[factor * number for number in step] for step in changed.differences]

    def shrinks_with_precision(self, replicas: int, course: Course) -> bool:
        """Whether the difference all but disappears in float64, as rounding does."""
        try:
            with in_float64():
                batches = [to_float64(batch) for batch in self._batches]
                recipe = self._recipe.with_batch(batches[0])
                other = Course(recipe.on_replicas(self._strategies[replicas]))
                run_in_lockstep(recipe.on_one_device(), [other], batches)
        except Exception:  # A layer may insist on another type; then float32 decides.
            return False
        if other.error is not None or not all_float64(other.participant.model):
            return False
        found, before = (max(map(max, each.differences)) for each in (other, course))
        return found <= SHRINKS_TO * before


def report(replicas: int, course: Course, loss: float | None, limits: Limits) -> Report:
    if course.error is not None:
        step = len(course.differences) + 1
        return Report(replicas, step=step, error=in_one_line(course.error), remark=BUG)
    # Without the loss, which is last, because rounding is measured on variables.
    largest, where = max(zip(course.differences[-1][:-1], course.names[-1], strict=False))
    explained = explain_trained(course.participant.model, limits.batch_size)
    parts = None
    # Sums are not worth mentioning: every step has them.
    if explained and (explained.reason or any(p.kind != "summed" for p in explained.parts)):
        parts = f"{explained.summary}."
    found = Report(replicas, loss, course.loss, largest, parts=parts)
    exceeded = limits.exceeds(course)
    if exceeded is not None and limits.repeats and limits.shrinks_with_precision(replicas, course):
        return limits.as_rounding(found, where)
    if exceeded is not None:
        step, name = exceeded
        remark = BUG if limits.repeats else UNREPEATABLE
        return dataclasses.replace(found, first_difference=name, step=step, remark=remark)
    if largest > limits.tolerance:
        return limits.as_rounding(found, where)
    return found


def tolerance(precision: str) -> float:
    """The relative difference that a compute type allows."""
    return TOLERANCE if precision == "float32" else HALF_PRECISION_TOLERANCE


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Make models that are built in this context compute in float64."""
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def to_float64(batch: Batch) -> Batch:
    def convert_part(part: Any) -> Any:
        return tf.cast(part, tf.float64) if part is not None and part.dtype.is_floating else part

    return keras.tree.map_structure(convert_part, batch)


def all_float64(model: keras.Model) -> bool:
    """Whether no weight and no layer of the model has a coarser type."""
    types = {keras.backend.standardize_dtype(weight.dtype) for weight in model.weights}
    types |= {layer.compute_dtype for layer in model_internals.layers_of(model)}
    return not types & {"float32", "float16", "bfloat16"}


def nudge(model: keras.Model, precision: str) -> None:
    """Change the last bit, in the model's compute type, of about half of the weights."""
    random = np.random.default_rng(0)
    last_bit = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[precision]
    # Frozen ones as well, because in transfer learning they amplify rounding.
    for variable in model.weights:
        if not keras.backend.is_float_dtype(variable.dtype):
            continue
        value = value_of(variable)
        variable.assign(value * (1 + last_bit * random.integers(0, 2, value.shape)))


def differences(ours: list[Value], theirs: list[Value]) -> list[float]:
    """The largest relative difference of each of our variables, over all copies of theirs."""
    # Optimizers create variables when they are first used; one that is only ours does not differ.
    largest: dict[str, float] = {}
    for value in ours:
        # A bias near zero is all rounding, so its scale is at least a hundredth of its layer's.
        largest[value.group] = max(largest.get(value.group, 0.0), size(value.copies[0]))
    copies = {value.place: value.copies for value in theirs}
    return [
        max(
            (
                relative_difference(one.copies[0], copy, GROUP_FRACTION * largest[one.group])
                for copy in copies.get(one.place, ())
            ),
            default=0.0,
        )
        for one in ours
    ]


def size(array: Any) -> float:
    """The largest absolute value of an array, leaving out NaN and infinity."""
    array = np.asarray(array, np.float64)
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def relative_difference(one: Any, other: Any, at_least: float = 0.0) -> float:
    """The largest difference of two arrays, relative to their largest value, or to `at_least`.

    Equal infinities and two NaNs count as equal; a NaN and a number differ infinitely.
    """
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if one.shape != other.shape or not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return float("inf")
    finite = np.isfinite(one)
    scale = max(size(one), size(other), at_least)
    return size(one[finite] - other[finite]) / scale if scale else 0.0
