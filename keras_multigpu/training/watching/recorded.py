"""`Recorded`: the loss, predictions and gradients of a step, and what one replica has of them.

    compute_loss(x, y, y_pred, ...) ──> loss      the tensors of its one call
    optimizer.apply(gradients)                    before they are clipped or accumulated

Of a loss or a gradient a replica has `Own`: what its examples add to it, and what belongs to no
example, such as a penalty of weights. Of predictions it has its rows.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import model_internals, optimizer_internals
from keras_multigpu.partition.emission.conversions import Scope, Value
from keras_multigpu.partition.emission.splitter import Splitter
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Block, Rows
from keras_multigpu.partition.rules.sums import LINEAR, SCALED
from keras_multigpu.training.exchange.packing import Packing
from keras_multigpu.training.shares import tensors_of
from keras_multigpu.training.variables.placement import own_optimizers

# More operations than there are between a sum and a gradient.
MAX_DEPTH = 20

ADDED, FIRST = -1, -2
"""How the pieces of a share make up what the replica has, if not as rows along an axis."""


class Own(NamedTuple):
    """A replica's part of a tensor.

    Attributes:
        examples: What its examples add to it, or its rows; None if they add nothing.
        whole: What belongs to no example, and so to every replica; None if there is nothing.
    """

    examples: Any
    whole: Any


class Seen(NamedTuple):
    """What a replica has of a step, for a piece of its share.

    Attributes:
        loss: The replica's part of the loss.
        total_loss: The loss.
        gradients: The replica's part of each gradient; of each component of a sparse one.
        total_gradients: The components of the gradients.
        predictions: Its rows of the predictions' leaves, and of what Keras attached to these.
        statistics: The new values of layers' state.
    """

    loss: Own
    total_loss: tf.Tensor
    gradients: list[Own]
    total_gradients: list[tf.Tensor]
    predictions: list[Any]
    statistics: list[tf.Tensor]


class Recorded:
    """What was recorded of a step while it was traced, or ran.

    Attributes:
        losses: What each call of `compute_loss` returned.
        y_pred: The predictions that its last call took.
        gradients: The gradients that optimizers got, with their variables, without None.
    """

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.y_pred: Any = None
        self.gradients: list[tuple[Any, keras.Variable]] = []
        self._attached: list[Any] = []
        self._joins: Any = None
        self._methods = 0

    @contextlib.contextmanager
    def recording(self, model: keras.Model) -> Iterator[None]:
        """Record the step that is traced, or runs, in this context, by other methods."""
        methods = [(model, "compute_loss", self._recording_loss(model.compute_loss))]
        for optimizer in own_optimizers(model):
            methods.append((optimizer, "apply", self._recording_gradients(optimizer)))
        before = [vars(owner).get(name) for owner, name, _ in methods]
        for owner, name, method in methods:
            vars(owner)[name] = method
        try:
            yield
        finally:
            for (owner, name, _), known in zip(methods, before, strict=True):
                del vars(owner)[name]
                if known is not None:
                    vars(owner)[name] = known

    def _recording_loss(self, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = method(*args, **kwargs)
            self.losses.append(loss)
            self.y_pred = signature.bind(*args, **kwargs).arguments.get("y_pred")
            self._attached = model_internals.attached(keras.tree.flatten(self.y_pred))
            return loss

        return compute_loss

    def _recording_gradients(self, optimizer: keras.optimizers.Optimizer) -> Callable[..., Any]:
        """A method that records the gradients it gets, unless a recording one calls it."""
        method = optimizer.apply

        # `apply_gradients` calls it, too.
        def apply(gradients: Any, *args: Any, **kwargs: Any) -> Any:
            gradients = list(gradients)
            if not self._methods:
                variables = args[0] if args else kwargs.get("trainable_variables")
                variables = variables or optimizer_internals.optimized_variables(optimizer)
                pairs = zip(gradients, variables, strict=True)
                self.gradients += [(g, v) for g, v in pairs if g is not None]
            self._methods += 1
            try:
                return method(gradients, *args, **kwargs)
            finally:
                self._methods -= 1

        return apply

    @property
    def loss(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.losses[0])

    @property
    def tensors(self) -> list[tf.Tensor]:
        """Everything that can be seen."""
        return tensors_of((self.losses, self._gradients, self.y_pred, self._attached))

    @property
    def _gradients(self) -> list[Any]:
        return [gradient for gradient, _ in self.gradients]

    @property
    def _predictions(self) -> list[Any]:
        return [*keras.tree.flatten(self.y_pred), *self._attached]

    def of_replica(
        self, splitter: Splitter, scope: Scope, statistics: Sequence[Value], batch: str
    ) -> Seen:
        """What a replica has, just after the splitter has added its part of the step."""
        tensors = scope.program.tensors
        loss = scope.values[tensors[self.loss.name]]
        gradients = [scope.values[tensors[part.name]] for part in tensors_of(self._gradients)]
        predictions = [prediction_of(splitter, scope, leaf, batch) for leaf in self._predictions]
        self._joins = Seen(
            Own(ADDED, FIRST),
            FIRST,
            [Own(axis_of(value.layout, ADDED), FIRST) for value in gradients],
            [FIRST for _ in gradients],
            [axis_of(layout, FIRST) for _, layout in predictions],
            [FIRST for _ in statistics],
        )
        return Seen(
            own_part(splitter, loss),
            splitter.convert(loss, REPLICATED),
            [own_part(splitter, value) for value in gradients],
            [splitter.convert(value, REPLICATED) for value in gradients],
            [tensor for tensor, _ in predictions],
            [splitter.convert(value, REPLICATED) for value in statistics],
        )

    def joined(self, pieces: Sequence[Seen]) -> Seen:
        """What a replica has of its share, from what it has of each piece."""

        def joined(join: int, *parts: Any) -> Any:
            if join == FIRST or len(parts) == 1 or parts[0] is None:
                return parts[0]
            if join == ADDED:
                return functools.reduce(operator.add, parts)
            return tf.concat(parts, join)

        whole: Seen = tf.nest.map_structure(joined, self._joins, *pieces)
        return whole

    def without_graph(self, model: keras.Model) -> Seen:
        """What a replica has of a step that it has run for the whole batch."""
        gradients = tensors_of(self._gradients)
        state = [v for v in model.non_trainable_variables if tf.as_dtype(v.dtype).is_floating]
        return Seen(
            Own(None, self.loss),
            self.loss,
            [Own(None, part) for part in gradients],
            gradients,
            self._predictions,
            [tf.convert_to_tensor(variable) for variable in state],
        )

    def with_attached(self, predictions: list[Any]) -> Any:
        """Predictions in the structure of `y_pred`, with what Keras attached to these."""
        own = predictions[: len(predictions) - len(self._attached)]
        model_internals.attach(own, predictions[len(own) :])
        return keras.tree.pack_sequence_as(self.y_pred, own)

    def packed_gradients(self, parts: Sequence[tf.Tensor]) -> list[Any]:
        """The gradients with these components."""
        found: list[Any] = tf.nest.pack_sequence_as(self._gradients, parts, expand_composites=True)
        return found


def axis_of(layout: Any, otherwise: int) -> int:
    """The axis along which a replica has rows."""
    return layout.axis if isinstance(layout, Rows) else otherwise


def own_part(splitter: Splitter, value: Value, depth: int = 0) -> Own:
    """A replica's part of a tensor, found in the linear operations that it comes from."""
    source, is_open = value.source, value.layout == PARTIAL
    plain = Own(value.local, None) if value.layout != REPLICATED else Own(None, value.local)
    if isinstance(value.layout, Rows) or source is None or not value.made_of or depth > MAX_DEPTH:
        return plain
    op, given = source.op, value.made_of
    linear = range(len(given))[LINEAR.get(op.type, slice(0))]
    places = [0] if op.type == "Cast" else [*linear, *SCALED.get(op.type, ())]
    floats = [source, *(given[place].local for place in places)]
    if not places or not all(tensor.dtype.is_floating for tensor in floats):
        return plain
    if any(isinstance(each.layout, Rows) for each in given):
        return plain
    parts = {place: own_part(splitter, given[place], depth + 1) for place in places}
    summed = [place for place, part in parts.items() if part.examples is not None]
    if op.type in SCALED:
        # The factor is the same for all.
        if len(summed) != 1:
            return plain
        parts = {place: parts[place] for place in summed}

    def result(kind: str) -> tf.Tensor | None:
        known = {place: getattr(part, kind) for place, part in parts.items()}
        if all(each is None for each in known.values()):
            return None
        inputs = []
        for place, each in enumerate(given):
            own = known[place] if place in known else splitter.convert(each, REPLICATED)
            inputs.append(tf.zeros_like(each.local) if own is None else own)
        return splitter.replica.run(op, inputs)[source.value_index]

    if not summed:
        return plain
    whole = result("whole")
    if not is_open:
        return Own(result("examples"), whole)
    if whole is None:
        return plain
    # Not from the operation's inputs: whether anything else holds one of these decides in which
    # order `AddN` adds them up, and a measurement must not change a number.
    first = tf.where(splitter.replica.is_first, whole, tf.zeros_like(whole))
    return Own(value.local - first, whole)


def prediction_of(
    splitter: Splitter, scope: Scope, leaf: Any, batch: str
) -> tuple[tf.Tensor | None, Any]:
    """What a replica has of a leaf of the predictions, with its layout."""
    tensor = scope.program.tensors.get(leaf.name) if isinstance(leaf, tf.Tensor) else None
    value = scope.values.get(tensor) if tensor else None
    if tensor is None or value is None:
        return None, None
    layout, dims = value.layout, scope.facts.dims(tensor)
    if not isinstance(layout, Rows):
        layout = REPLICATED
        of_batch = Rows(0, (Block(batch),))
        if dims and dims[0] == scope.facts.length(of_batch.blocks):
            layout = of_batch
    return splitter.convert(value, layout), layout


def square_norm_of_all(gradients: Sequence[Any]) -> tf.Tensor:
    """The sum of the squares of dense and sparse gradients, in few operations."""
    dense = [gradient for gradient in gradients if not isinstance(gradient, tf.IndexedSlices)]
    summands = [*Packing(dense).pack(dense)]
    for sparse in (each for each in gradients if isinstance(each, tf.IndexedSlices)):
        # A row may come several times.
        rows, positions = tf.unique(sparse.indices)
        summands.append(tf.math.unsorted_segment_sum(sparse.values, positions, tf.shape(rows)[0]))
    squares = [tf.reduce_sum(tf.square(tf.cast(each, tf.float32))) for each in summands]
    return tf.add_n([tf.zeros(()), *squares])
