"""The compiled steps of a model, made for the batches that come.

A step is made once for each form of batch (structure, dtypes, shapes) and used by every later
`fit`, `evaluate` and `predict`, so that repeated calls neither trace again nor use more memory.
"""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.source_line import line_of_error
from keras_multigpu.training.feed.cutter import Cutter, SharesInGraph, replayed
from keras_multigpu.training.feed.feed import Group
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.runners.whole_step import equalize
from keras_multigpu.training.shares import (
    Batch,
    Groups,
    Here,
    Rows,
    Shares,
    batch_size_of,
    groups_of,
    lengths_of,
    present_leaves,
    share_spec,
    shares_here,
    sized_spec,
    with_leaves,
)
from keras_multigpu.training.steps.misfits import Misfits, after_dependencies, has_open_axes
from keras_multigpu.training.steps.one_device import one_at_a_time
from keras_multigpu.training.steps.passes import check
from keras_multigpu.training.variables.placement import left_by, moves

logger = logging.getLogger("keras_multigpu")

# TensorFlow warns of a function that is traced this often.
MANY_SIZES = 5

MakeStep = Callable[[Batch, Groups], Runner]
"""Makes a step for batches of these specs, with leaves in these groups of equal length."""


class StepFunctions:
    """The compiled form of one kind of step: training, evaluation or prediction.

    Args:
        make_step: Makes a step.
        cutter: Cuts batches into shares.
        eager: Whether Python runs the steps directly.
        data_wait: Adds up the seconds that graphs wait for data, if given.
        as_given: Whether batches that came in different forms, `x` and `(x,)`, need a step each.

    Attributes:
        keeps: What must live as long as these steps.
    """

    def __init__(
        self,
        make_step: MakeStep,
        cutter: Cutter,
        eager: bool,
        data_wait: tf.Variable | None = None,
        as_given: bool = False,
    ) -> None:
        self._make_step, self._cutter = make_step, cutter
        self._eager = eager
        self._data_wait, self._as_given = data_wait, as_given
        self._single: dict[tuple[Hashable, Here, Groups], Any] = {}
        self._looped: dict[Hashable, Any] = {}
        self._forms: dict[Hashable, Batch] = {}
        self._first_given: dict[Hashable, Batch] = {}
        # Whether the model needs a step for each number of examples; and before that is known, the
        # error of a step for any number.
        self._of_sizes = False
        self._error: Exception | None = None
        self._sizes: set[int | None] = set()
        self._moves = moves()
        self.keeps: Sequence[Any] = ()

    @property
    def steps(self) -> list[Any]:
        return list(self._single.values())

    @property
    def runners(self) -> list[Runner]:
        """What runs each step that has been made."""
        return [getattr(step, "runner", step) for step in self.steps]

    @property
    def alone(self) -> bool:
        """Whether one replica takes the whole batch in any step."""
        return any(runner.unsplit_because for runner in self.runners)

    @property
    def is_skippable(self) -> bool:
        """Whether all steps so far change nothing when a worker wants to stop."""
        return bool(self._single) and all(runner.is_skippable for runner in self.runners)

    def run(self, group: Group, spec: Batch | None) -> Any:
        """Run a group of batches; the results of the last step."""
        self._error = None
        if group.iterator is not None and spec is not None:
            return self._run_in_graph(group.iterator, group, self._taken(spec))
        return self._run_all(group.shares, spec)

    def _run_all(self, batches: Iterable[Shares], spec: Batch | None) -> Any:
        for shares in batches:
            result = self.run_one(shares, spec)
        return result

    def _run_in_graph(self, batches: SharesInGraph, group: Group, spec: Batch) -> Any:
        """Run batches that the graph reads by itself."""
        iterator, several, left = batches.iterator, group.most > 1, group.size
        here, groups = shares_here(iterator.element_spec), self._known_groups(spec)
        if not self._is_possible(spec, here, groups):
            return self._run_all(itertools.islice(batches, left), spec)
        if not is_checked(self._step(spec, here, groups)):
            # Python reads the first batch, looks at it, and puts it back.
            first = next(batches)
            if first.groups not in ((), groups) or given_spec(spec, first, (0,)) != spec:
                return self._run_in_python(first, batches, left, spec)
            rows = first.rows if groups else counted_once(first.rows)
            again = replayed(first.rows, iterator.element_spec, self._cutter.devices)
            self._checked(spec, here, rows, groups)
            if again is None:
                result = self.run_one(first, spec)
            else:
                loop, _ = self._loop(again, spec, several)
                result = loop(again, tf.constant(1))
            left -= 1
        if left:
            loop, misfits = self._loop(iterator, spec, several)
            try:
                return loop(iterator, tf.constant(left))
            except tf.errors.InvalidArgumentError:
                if misfits is None or not misfits.is_full:
                    raise
            first, before = misfits.take()
            return self._run_in_python(first, batches, left - before, spec)
        return result

    def _run_in_python(self, first: Shares, rest: SharesInGraph, left: int, spec: Batch) -> Any:
        """Run `left` batches, of which the first needs a step of its own."""
        # The next ones probably need it too.
        rest.in_graph = False
        batches: Iterator[Shares] = itertools.chain([first], rest)
        return self._run_all(itertools.islice(batches, left), spec)

    def run_one(
        self, shares: Shares, spec: Batch | None = None, *, is_argument: bool = False
    ) -> Any:
        """Run one batch.

        Args:
            shares: The batch.
            spec: The specs of all batches of its source, if it has them.
            is_argument: Whether plain Keras passes such a batch to its graph, which then takes the
                first form of batches only; another graph takes all others.
        """
        if shares.spec is not None:
            spec = self._common_spec(shares.spec)
        assert spec is not None
        # What is known of open lengths holds for one and more.
        spec = given_spec(spec, shares, lengths=(0,))
        full, spec, groups = spec, self._taken(spec), shares.groups
        rows = shares.rows if groups else counted_once(shares.rows)
        here = shares_here(rows)
        is_possible = self._is_possible(spec, here, groups)
        step = self._step(spec, here, groups) if is_possible and is_argument else None
        if isinstance(step, CompiledStep) and step.keeps_state:
            # Each graph of random operations with a state continues from its own last draw.
            given = given_spec(sized_spec(full, shares.sizes), shares)
            form = keras.tree.map_structure(form_of, full)
            is_first = self._first_given.setdefault(key_of(form), given) == given
            spec = given if is_first else full
        if not is_possible:
            error, self._error = self._error, None
            try:
                spec = self._with_size(spec, here, shares)
            except Exception:
                if error is None:
                    raise
                # With a size it fails as well: report the error without one.
                raise error from None
        return self._checked(spec, here, rows, groups)(rows)

    def _is_possible(self, spec: Batch, here: Here, groups: Groups) -> bool:
        """Whether one step takes all batches of these specs."""
        if self._of_sizes or self._error is not None:
            return False
        try:
            self._step(spec, here, groups)
        except Exception as error:  # User code may need to know the batch size.
            if batch_size_of(spec) is not None:
                raise
            self._error = error
            return False
        return True

    def _with_size(self, spec: Batch, here: Here, shares: Shares) -> Batch:
        """The specs with the number of examples of these shares, for which a step is made."""
        spec = sized_spec(spec, shares.sizes)
        self._step(spec, here, shares.groups)
        self._of_sizes = True
        known = len(self._sizes)
        self._sizes.add(batch_size_of(spec))
        if known < len(self._sizes) == MANY_SIZES:
            logger.warning(
                "The model reads the batch size in Python (as `int(x.shape[0])` does), so its step "
                "is traced again for each size, %d times so far. Use `tf.shape(x)[0]`, or batches "
                "of one size, to have it traced once.",
                MANY_SIZES,
            )
        return spec

    def make(self, spec: Batch, here: Here = ()) -> None:
        """Compile the step for batches of these specs in advance."""
        spec = self._taken(spec)
        step = self._step(spec, here, self._known_groups(spec))
        step.graph  # noqa: B018 (which is made when it is first asked for)

    def _taken(self, spec: Batch) -> Batch:
        """The specs, with the form in which a batch came only if the step sees it."""
        return spec if self._as_given else tuple(spec)

    def _known_groups(self, spec: Batch) -> Groups:
        """The groups of leaves with equally many rows; open lengths count as equal."""
        return groups_of(lengths_of(spec))

    def _common_spec(self, spec: Batch) -> Batch:
        """The specs of all batches of this form so far, open where they differ."""
        # So sentences of many lengths need two steps, and not one for each length.
        form = keras.tree.map_structure(form_of, spec)
        known = self._forms.setdefault(key_of(form), spec)
        common = keras.tree.map_structure(common_spec, known, spec)
        self._forms[key_of(form)] = common
        return common

    def _forget_left(self) -> None:
        """Drop the steps whose variables have moved, for another model or to other devices."""
        if self._moves == moves():
            return
        self._moves = moves()
        kept = {key: step for key, step in self._single.items() if not uses_left(step)}
        if len(kept) < len(self._single):
            self._single, self._looped = kept, {}

    def _step(self, spec: Batch, here: Here, groups: Groups) -> Any:
        self._forget_left()
        key = key_of(spec), here, groups
        if key not in self._single:
            # It looks up where variables live, while no other trace may move them.
            with one_at_a_time:
                step: Any = self._make_step(spec, groups)
            if not self._eager:
                share = share_spec(spec, self._cutter.replicas, groups)
                elsewhere = share._replace(data=(None, None, None))
                present = here or [True] * self._cutter.replicas
                step = CompiledStep(step, [share if one else elsewhere for one in present])
            self._single[key] = step
        return self._single[key]

    def _checked(self, spec: Batch, here: Here, rows: Sequence[Rows], groups: Groups) -> Any:
        """The step for a batch; a new step is tried on it."""
        step = self._step(spec, here, groups)
        if not is_checked(step):
            check(step.runner, rows)
        return step

    def _loop(self, iterator: Any, spec: Batch, several: bool) -> Any:
        here = shares_here(iterator.element_spec)
        key = (key_of(spec), here, several)
        if key not in self._looped:
            groups = self._known_groups(spec)
            open_ones = [n for n in lengths_of(spec) if n is None]
            may_be_empty = any(map(has_open_axes, keras.tree.flatten(spec)))
            # A single open length may differ from the others.
            misfits = Misfits(groups) if len(open_ones) > 1 or may_be_empty else None

            def read(iterator: Any, number: tf.Tensor | int = 0) -> Any:
                rows = next_of(iterator, self._data_wait)
                if misfits is not None and (may_be_empty or len(rows[0].whole) > 1):
                    rows = misfits.check(rows, number)
                return rows if groups else counted_once(rows)

            loop = looped(self._step(spec, here, groups), iterator, read, several)
            self._looped[key] = loop, misfits
        return self._looped[key]


class CompiledStep:
    """A step as one graph, which takes the leaves of the replicas' rows."""

    def __init__(self, runner: Runner, spec: Sequence[Rows]) -> None:
        self.runner = runner
        self._spec = spec

    @functools.cached_property
    def graph(self) -> Any:
        # Not before it is needed: a function that runs a single step has the step's operations in
        # its own graph, so that variables need not be passed from graph to graph.
        function = tf.function(lambda *leaves: self._on_leaves(leaves), autograph=False)
        graph = function.get_concrete_function(*present_leaves(self._spec))
        # A graph that calls this one has only weak references to its variables.
        self._variables = graph.variables
        return graph

    @functools.cached_property
    def keeps_state(self) -> bool:
        """Whether random operations, as `tf.random.normal` adds, remember their last draw."""
        return any(
            op.op_def.is_stateful and "seed2" in op.node_def.attr for op in self.runner.operations
        )

    def __call__(self, rows: Sequence[Rows]) -> Any:
        graph = self.graph
        with self.errors():
            return graph(*present_leaves(rows))

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Let errors of the graph name the user's line, and leave equal replicas behind."""
        try:
            with graph_internals.optimized_before():
                yield
        except BaseException as error:
            # Some replicas may have assigned new values.
            equalize(self.runner.copies)
            if not isinstance(error, tf.errors.OpError):
                raise
            # TensorFlow knows no more of the line.
            line = line_of_error(error.message, self.runner.operations)
            if line is None:
                raise
            text = f"Raised at {line}, where a replica computed its part of the batch."
            raise type(error)(error.node_def, error.op, f"{text}\n{error.message}") from None

    def _on_leaves(self, leaves: Sequence[Any]) -> Any:
        return self.runner(with_leaves(self._spec, leaves))


def given_spec(spec: Batch, shares: Shares, lengths: Collection[int] | None = None) -> Batch:
    """The specs of one batch, with the lengths that its other axes have.

    Args:
        lengths: Which ones; the others stay open.
    """

    def given(leaf: Any, own: Any) -> Any:
        if not isinstance(leaf, tf.TensorSpec) or not isinstance(own, tf.Tensor):
            return leaf
        shape = leaf.shape.as_list()
        for axis, length in enumerate(own.shape[1:], 1):
            if lengths is None or length in lengths:
                shape[axis] = length
        return tf.TensorSpec(shape, leaf.dtype)

    specs = keras.tree.flatten(spec)
    if not any(map(has_open_axes, specs)):
        return spec
    rows = next(rows for rows in shares.rows if rows.is_here)
    # The data has the form in which it came, which the specs may have lost.
    leaves = map(given, specs, keras.tree.flatten(rows.data))
    found: Batch = keras.tree.pack_sequence_as(spec, list(leaves))
    return found


def counted_once(rows: Sequence[Rows]) -> tuple[Rows, ...]:
    """The rows of leaves of one length, with one number for all."""
    return tuple(each._replace(own=each.own[:1], whole=each.whole[:1]) for each in rows)


def uses_left(step: Any) -> bool:
    """Whether a step takes copies that no longer hold the values of their variables."""
    copies = step.runner.copies if isinstance(step, CompiledStep) else ()
    return any(left_by(copy) is not None for each in copies for copy in each)


def is_checked(step: Any) -> bool:
    """Whether a step may run; a training step is tried first."""
    return not isinstance(step, CompiledStep) or step.runner.is_checked


def looped(step: CompiledStep, iterator: Any, read: Callable[..., Any], several: bool) -> Any:
    """A function of an iterator and a number that runs this number of steps in one graph.

    Args:
        several: Whether the number may be more than one.
    """

    def run(iterator: Any, count: tf.Tensor) -> Any:
        if not several:
            # In this graph and not called: handles of variables would pass two graphs, with 8
            # replicas of a MobileNet 4,688 operations around 18,717; now there are 9,452 in all.
            return step.runner(read(iterator))

        # A loop needs initial values; the first step replaces them.
        form = step.graph.structured_outputs
        leaves = leaves_of(form)
        nothing = [tf.zeros([dim or 0 for dim in leaf.shape], leaf.dtype) for leaf in leaves]

        def body(index: tf.Tensor, *_: Any) -> Any:
            return index + 1, *leaves_of(step(read(iterator, index)))

        # In sequence: a step reads the variables that the previous one has assigned.
        _, *logs = tf.while_loop(
            lambda index, *_: index < count,
            body,
            (0, *nothing),
            shape_invariants=(tf.TensorShape(()), *(leaf.shape for leaf in leaves)),
            parallel_iterations=1,
        )
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else logs.pop(0), form, expand_composites=True
        )

    graph = tf.function(run, autograph=False).get_concrete_function(
        iterator, tf.TensorSpec((), tf.int32)
    )
    return step.errors()(graph)


def leaves_of(results: Any) -> list[Any]:
    """The tensors in a step's results, where None may stand, too."""
    leaves = tf.nest.flatten(results, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


def next_of(iterator: Any, data_wait: tf.Variable | None) -> Any:
    """The next batch's shares, inside a graph; the time is added to `data_wait`."""
    if data_wait is None:
        return iterator.get_next()
    with tf.device(data_wait.device):
        asked = tf.timestamp()
    with tf.control_dependencies([asked]):
        batch = iterator.get_next()
    with tf.device(data_wait.device):
        # With tensors come their shapes. To wait for tensors on a GPU is to wait for all that it
        # was told to do before, and TensorFlow would do that here if nothing used the numbers.
        come = [tf.debugging.Assert(rows.examples >= 0, [""]) for rows in batch]
        with tf.control_dependencies(come):
            waited = tf.timestamp() - asked
        data_wait.assign_add(waited)

    # The step must not begin before the time has been taken.
    with tf.control_dependencies([waited]):
        return after_dependencies(batch)


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
