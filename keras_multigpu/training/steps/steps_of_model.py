"""The compiled steps of a model, made for the batches that come.

A step is made once for each form of batch (structure, dtypes, shapes) and used by every later
`fit`, `evaluate` and `predict`, so that repeated calls neither trace again nor use more memory.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.source_line import line_of_error
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.runners.replica_runner import ReplicaRunner
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.runners.whole_step import equalize
from keras_multigpu.training.shares import (
    Batch,
    Shares,
    batch_size_of,
    have_rows,
    joined,
    present_leaves,
    share_spec,
    whole_spec,
    with_leaves,
    with_shape,
)
from keras_multigpu.training.steps.one_device import one_at_a_time
from keras_multigpu.training.steps.passes import check
from keras_multigpu.training.variables.placement import left_by, moves

logger = logging.getLogger("keras_multigpu")

# TensorFlow warns of a function that is traced this often.
MANY_SIZES = 5


class StepFunctions:
    """The compiled form of one kind of step: training, evaluation or prediction.

    Args:
        eager: Whether Python runs the steps directly.
        sees_form: Whether batches that came in different forms, `x` and `(x,)`, need a step each.

    Attributes:
        keeps: What must live as long as these steps.
    """

    def __init__(
        self,
        make_step: Callable[[Batch], Runner],
        cutter: Cutter,
        eager: bool,
        sees_form: bool = False,
    ) -> None:
        self._make_step, self._cutter = make_step, cutter
        self._eager, self._sees_form = eager, sees_form
        self._made: dict[Hashable, MadeStep] = {}
        self._latest: KnownSpec | None = None
        self._forms: dict[Hashable, Batch] = {}
        self._first_given: dict[Hashable, Batch] = {}
        # Of how many examples there are steps, if the model needs one for each number.
        self._sizes: set[int | None] = set()
        self._moves = moves()
        self.keeps: Sequence[Any] = ()

    @property
    def runners(self) -> list[Runner]:
        """What runs each step that has been made."""
        return [made.runner for made in self._made.values()]

    def __call__(self, shares: Shares, *, is_argument: bool = False) -> Any:
        """Run one batch.

        Args:
            shares: The batch.
            is_argument: Whether plain Keras passes such a batch to its graph, which then takes the
                first form of batches only; another graph takes all others.
        """
        if self._moves != moves():
            # Drop the steps whose variables have moved, for another model or to other devices.
            self._moves, self._latest = moves(), None
            self._made = {key: made for key, made in self._made.items() if not made.uses_left}
        spec = shares.spec if shares.is_usual else self._common_spec(shares.spec)
        known = self._latest
        if known is None or known.spec is not spec:
            known = self._latest = KnownSpec(spec)
        shares = known.exact(shares)
        step = known.step
        if step is None or shares.spec is not known.spec or (is_argument and step.keeps_state):
            step = self._step_for(known, shares, is_argument)
        return step(shares)

    def _step_for(self, known: "KnownSpec", shares: Shares, is_argument: bool) -> "MadeStep":
        """A tried step for a batch."""
        all_here, full = shares.size is None, shares.spec
        spec, error = self._taken(full), None
        if not self._sizes:
            try:
                step = self._step(spec, all_here)
            except Exception as failure:  # User code may need to know the batch size.
                if batch_size_of(spec) is not None:
                    raise
                error = failure
        if self._sizes or error is not None:
            try:
                sized = given_spec(spec, shares, lambda axis, length, has_rows: axis == 0)
                step = self._step(sized, all_here)
            except Exception:
                if error is None:
                    raise
                # With a size it fails as well: report the error without one.
                raise error from None
            self._note_size(batch_size_of(sized))
        elif is_argument and step.keeps_state:
            # Each graph of random operations with a state continues from its own last draw.
            given = given_spec(full, shares, lambda axis, length, has_rows: True)
            form = keras.tree.map_structure(form_of, full)
            is_first = self._first_given.setdefault(key_of(form), given) == given
            step = self._step(given if is_first else full, all_here)
        elif full is known.spec:
            known.step = step
        runner = step.runner
        if isinstance(runner, ReplicaRunner) and not runner.is_checked:
            check(runner, shares.rows)
        return step

    def _note_size(self, size: int | None) -> None:
        known = len(self._sizes)
        self._sizes.add(size)
        if known < len(self._sizes) == MANY_SIZES:
            logger.warning(
                "The model reads the batch size in Python (as `int(x.shape[0])` does), so its step "
                "is traced again for each size, %d times so far. Use `tf.shape(x)[0]`, or batches "
                "of one size, to have it traced once.",
                MANY_SIZES,
            )

    def make(self, spec: Batch, all_here: bool = True) -> None:
        """Compile the step for batches of these specs in advance."""
        self._step(self._taken(spec), all_here).prepare()

    def _taken(self, spec: Batch) -> Batch:
        """The specs, with the form in which a batch came only if the step sees it."""
        return spec if self._sees_form else tuple(spec)

    def _common_spec(self, spec: Batch) -> Batch:
        """The specs of all batches of this form so far, open where they differ."""
        # So sentences of many lengths need two steps, and not one for each length.
        latest = None if self._latest is None else self._latest.spec
        # Batches of different forms are equal as tuples.
        if type(latest) is type(spec) and latest == spec:
            return latest
        form = key_of(keras.tree.map_structure(form_of, spec))
        known = self._forms.setdefault(form, spec)
        common: Batch = keras.tree.map_structure(common_spec, known, spec)
        if common != known:
            self._forms[form] = common
        return self._forms[form]

    def _step(self, spec: Batch, all_here: bool) -> "MadeStep":
        key = key_of(spec), all_here
        if key not in self._made:
            # It looks up where variables live, while no other trace may move them.
            with one_at_a_time:
                runner = self._make_step(spec)
            replicas = self._cutter.replicas
            here = (None if all_here else self._cutter.here) or range(replicas)
            self._made[key] = MadeStep(runner, spec, replicas, here, self._eager)
        return self._made[key]


class KnownSpec:
    """The specs of a source's batches, and the tried step for those that have nothing unusual."""

    def __init__(self, spec: Batch) -> None:
        self.spec = spec
        self.step: MadeStep | None = None
        leaves = present_leaves(spec)
        known = list(enumerate(zip(leaves, have_rows(leaves), strict=True)))
        rows = [place for place, (_, has_rows) in known if has_rows]
        is_known = all(leaves[place].shape[0] is not None for place in rows)
        self._first, *self._compared = rows if rows and not is_known else [0]
        # What is known of open lengths holds for one and more.
        self._open = [
            (place, has_rows)
            for place, (leaf, has_rows) in known
            if isinstance(leaf, tf.TensorSpec) and None in leaf.shape.as_list()[has_rows:]
        ]

    def exact(self, shares: Shares) -> Shares:
        """The shares with these specs, or with their own if there is anything unusual.

        What is not as long as the first leaf becomes whole.
        """
        spec, here = self.spec, [leaves for leaves in shares.leaves if leaves]
        lengths = [leaves[self._first].shape[0] for leaves in here] if self._compared else []
        others = [
            place
            for place in self._compared
            if any(own[place].shape[0] != n for own, n in zip(here, lengths, strict=True))
        ]
        if others:
            leaves = [list(own) for own in shares.leaves]
            for place in others:
                with tf.device(HOST):
                    whole = joined([own[place] for own in leaves])
                for own in leaves:
                    own[place] = whole
            specs = present_leaves(spec)
            marked = [whole_spec(each) if n in others else each for n, each in enumerate(specs)]
            spec, shares = with_leaves(spec, marked), shares._replace(leaves=leaves)
        tensors = next(own for own in shares.leaves if own)
        if others or any(0 in tensors[place].shape[has_rows:] for place, has_rows in self._open):
            spec = given_spec(
                spec,
                shares,
                lambda axis, length, has_rows: length == 0 and not (axis == 0 and has_rows),
            )
        return shares._replace(spec=spec)


class MadeStep:
    """A step that is given the shares of a batch.

    Args:
        replicas: How many replicas take a share.
        here: Those whose shares are in this process.
        eager: Whether Python runs it; otherwise it is one graph, which takes the leaves of the
            replicas' rows.
    """

    def __init__(
        self, runner: Runner, spec: Batch, replicas: int, here: range, eager: bool
    ) -> None:
        self.runner, self._spec, self._replicas = runner, spec, replicas
        self._here, self._eager = here, eager

    @functools.cached_property
    def graph(self) -> Any:
        own = share_spec(self._spec, self._replicas)
        specs = own * len(self._here)
        if len(self._here) < self._replicas:
            specs.append(tf.TensorSpec((), tf.int32))

        def on_leaves(*given: Any) -> Any:
            rest = iter(given)
            leaves = [
                list(itertools.islice(rest, len(own) if number in self._here else 0))
                for number in range(self._replicas)
            ]
            return self.runner(Shares(leaves, self._spec, size=next(rest, None)).rows)

        graph = tf.function(on_leaves, autograph=False).get_concrete_function(*specs)
        # The graph has only weak references to its variables.
        self._variables = graph.variables
        return graph

    @property
    def uses_left(self) -> bool:
        """Whether it takes copies that no longer hold the values of their variables."""
        return any(left_by(copy) is not None for each in self.runner.copies for copy in each)

    def prepare(self) -> None:
        """Compile it before its first batch."""
        if not self._eager:
            self.graph  # noqa: B018 (which is made when it is first asked for)

    @functools.cached_property
    def keeps_state(self) -> bool:
        """Whether random operations, as `tf.random.normal` adds, remember their last draw."""
        return any(
            op.op_def.is_stateful and "seed2" in op.node_def.attr for op in self.runner.operations
        )

    def __call__(self, shares: Shares) -> Any:
        progress = self.runner.progress
        if progress is not None:
            progress.calls += 1
        if self._eager:
            return self.runner(shares.rows)
        size = () if shares.size is None else (shares.size,)
        graph = self.graph
        open_sums = self.runner.open_sums
        if open_sums is not None:
            open_sums.before_step(self.runner.waiting)
        try:
            with graph_internals.optimized_before():
                return graph(*itertools.chain(*shares.leaves, size))
        except BaseException as error:
            if progress is not None:
                progress.begin_again()
            if open_sums is not None:
                open_sums.rescue()
            # Some replicas may have assigned new values.
            equalize(self.runner.copies)
            if not isinstance(error, tf.errors.OpError):
                raise
            # TensorFlow knows no more of the user's line.
            line = line_of_error(error.message, self.runner.operations)
            if line is None:
                raise
            text = f"Raised at {line}, where a replica computed its part of the batch."
            raise type(error)(error.node_def, error.op, f"{text}\n{error.message}") from None


def given_spec(
    spec: Batch, shares: Shares, wanted: Callable[[int, int | None, bool], bool]
) -> Batch:
    """The specs of one batch, with those lengths of open axes that are `wanted`."""
    tensors, examples = next(leaves for leaves in shares.leaves if leaves), sum(shares.counts)

    def given(leaf: Any, has_rows: bool, tensor: Any) -> Any:
        if not leaf.shape.rank:
            return leaf
        shape, lengths = leaf.shape.as_list(), tensor.shape.as_list()
        lengths[0] = examples if has_rows else lengths[0]
        for axis in range(len(shape) if isinstance(leaf, tf.TensorSpec) else 1):
            if shape[axis] is None and wanted(axis, lengths[axis], has_rows):
                shape[axis] = lengths[axis]
        return with_shape(leaf, shape)

    leaves = present_leaves(spec)
    found = map(given, leaves, have_rows(leaves), tensors)
    return with_leaves(spec, list(found))


def key_of(spec: Batch) -> Hashable:
    return str(keras.tree.map_structure(lambda _: 0, spec)), tuple(keras.tree.flatten(spec))


def form_of(spec: tf.TypeSpec | None) -> Hashable:
    """What leaves of batches must have in common for one step to take them."""
    if spec is None:
        return None
    rank, is_row = spec.shape.rank, spec.shape[:1] == [1]
    return type(spec).__name__, spec.dtype, rank, is_row, getattr(spec, "ragged_rank", None)


def common_spec(known: tf.TypeSpec | None, other: tf.TypeSpec | None) -> tf.TypeSpec | None:
    """The spec of two leaves of the same form, open where they differ."""
    return None if known is None else known.most_specific_common_supertype([other])
