"""Follows the batch's axis through what a user's code does, and tells where rows are related.

A replica has its share of the batch. What is computed from several examples, such as a mean or
maximum along the batch's axis, a difference of rows with rows, a reversal, is then another number
than on one device. Nobody would see it, so it is looked for while the first step is traced (or
first runs, without a graph), and said once, with the line that does it. What Keras's own layers
do, as BatchNormalization, is known and documented.

A rule says what an operation makes of what is known of its inputs. Those that judge stand here:
what becomes of means, sums and counts. Those that only follow an axis stand in `moved_axis`.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import model_internals, step_hooks
from keras_multigpu.training.replica_pass.moved_axis import (
    MOVES,
    RELATED,
    ROW,
    Operation,
    Trait,
)
from keras_multigpu.training.variables.catching_scope import CatchingScope

logger = logging.getLogger("keras_multigpu")

RELATES = (
    "%s relates examples of a batch to each other (%s: %s). A replica, or a micro-batch, has its "
    "part of the batch, so this gives other numbers than on one device. %s `keras_multigpu.verify` "
    "tells how much they differ."
)

ADVICE = (
    "Take `keras.layers.BatchNormalization` for statistics of the batch. Write "
    "what compares examples as a loss for `compile` or in `compute_loss`: these are given the "
    "whole batch. Give `add_loss` a mean over the examples, `TextVectorization` an "
    "`output_sequence_length` and `to_tensor` a `shape`, or mask the padding. Or train on one "
    "device: `kmg.strategy('one_device')`."
)

ASSIGNMENTS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")

_told: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()
_seen: "weakref.WeakKeyDictionary[keras.Model, dict[bool, bool]]" = weakref.WeakKeyDictionary()
"""Whether the outputs of models without a graph are in order, in inference and in training."""


class Finding(NamedTuple):
    """Where a user's code relates rows: the operation that does it, and the line."""

    kind: str
    where: str


class RowsFlow:
    """What is known of the tensors that some rows become."""

    def __init__(self, rows: Any) -> None:
        tensors = [leaf for leaf in tf.nest.flatten(rows) if isinstance(leaf, tf.Tensor)]
        leaves = [tensor for tensor in tensors if tensor.shape.rank]
        lengths = {leaf.shape[0] for leaf in leaves}
        self._length = lengths.pop() if len(lengths) == 1 else None
        self.found: list[Finding] = []
        self.quiet = False
        self._line: Callable[[], str | None] = step_hooks.user_line
        self._traits: dict[Any, Trait] = {}
        self._kept: list[Any] = []
        for leaf in leaves:
            self._set(leaf, Trait("rows"))

    def trait(self, tensor: Any) -> Trait | None:
        """What a tensor is of the batch, if anything is known."""
        return self._traits.get(key_of(tensor)) if isinstance(tensor, tf.Tensor) else None

    def in_order(self, tensor: Any) -> bool:
        """Whether a tensor's rows stand in the order of the examples, as far as is known."""
        trait = None if tensor is None else self.trait(tensor)
        return trait is None or trait.kind != "rows" or trait.blocks in (None, 1)

    def forget(self, tensor: Any) -> None:
        """Take a tensor for one that all replicas have in common."""
        self._traits.pop(key_of(tensor), None)

    def is_total(self, tensor: Any) -> None:
        """Take a tensor for the sum over the rows of all replicas."""
        self._set(tensor, Trait("total"))

    def find(self, kind: str) -> None:
        """Note that the user's code relates rows here."""
        where = self._line()
        if where is not None:
            self.found.append(Finding(kind, where))

    def find_stored(self, value: Any, made_by: tf.Operation | None = None) -> None:
        """Note a variable's new value that has rows: it gets one value, not all replicas' rows."""
        trait = self.trait(value)
        if trait is not None and trait.kind in ("row", "rows"):
            where = self._line() if made_by is None else step_hooks.user_line(made_by)
            if where is not None:
                self.found.append(Finding("rows kept in a variable", where))

    def find_sums(self, losses: Any) -> None:
        """Note which of the losses that layers have added are sums over rows."""
        for loss in losses:
            trait = self.trait(loss)
            if trait and trait.kind == "sum" and trait.where:
                self.found.append(Finding("a sum for `add_loss`", trait.where))

    def note_all(self, operations: Sequence[tf.Operation]) -> None:
        """Follow operations of a graph, in the order in which they were made."""
        outer = self._line
        for each in operations:
            self._line = functools.partial(step_hooks.user_line, each)
            self.note(each.type, each.inputs, (), each.outputs)
        self._line = outer

    def note(self, kind: str, inputs: Any, attributes: Any, outputs: Any) -> None:
        """Follow an operation that was made or run; its attributes matter where no graph has it."""
        if kind in ASSIGNMENTS and not self.quiet:
            self.find_stored(inputs[1])
        if kind == "RaggedTensorToTensor" and not self.quiet and pads_to_longest(inputs[0]):
            self.find(PADDING)
        if not outputs:
            return
        traits = [self.trait(tensor) for tensor in inputs]
        op = Operation(kind, inputs, attributes, outputs, traits, self._length)
        if ("Random" in kind or "Shuffle" in kind) and not op.rows:
            self._keep_random(outputs)
            return
        if not any(traits):
            return
        inside = self._inside(op)
        found = self._after(op)
        for tensor, trait in zip(outputs, inside, strict=True):
            known = trait or found
            if known is None or known.kind == "lost":
                known = self._by_shape(op, tensor) or known
            self._keep(tensor, known)

    def _inside(self, op: Operation) -> list[Trait | None]:
        """What the functions that an operation calls make of the batch, for each output."""
        found: list[Trait | None] = [None] * len(op.outputs)
        if op.kind not in step_hooks.BODIES:
            return found
        for body in step_hooks.bodies(op.kind, op.outputs[0]):
            for key in [key for key in self._traits if key[0] is body]:
                del self._traits[key]  # It may be called again with others.
            # A condition is handed over before what its branches are given.
            given = op.traits[len(op.traits) - len(body.inputs) :]
            for tensor, trait in zip(body.inputs, given, strict=True):
                if trait is not None:
                    self._set(tensor, trait)
            self.note_all(body.get_operations())
            found = [a or self.trait(b) for a, b in zip(found, body.outputs, strict=True)]
        return found

    def _after(self, op: Operation) -> Trait | None:
        """What an operation makes; one that relates rows is noted."""
        try:
            found = trait_of(op)
        except (IndexError, TypeError, ValueError, AttributeError):
            return None  # An operation of a form that no rule foresees: its shape may tell.
        if found is None or self.quiet:
            return found if found and found.kind == "rows" else None
        if found.kind in ("mean", "sum") and not op.figures:
            return found._replace(where=self._line())
        if found == RELATED:
            origins = [t.where for t in op.figures]
            where = next(filter(None, origins), None) if origins else self._line()
            if where is None:  # Keras's own doing, after which the rows are rows.
                return op.rows[0][1] if op.rows else None
            self.found.append(Finding(op.kind, where))
        return found

    def _keep_random(self, outputs: Any) -> None:
        """Numbers for each row are rows; a list of them, from which an order is made, is not."""
        for tensor in outputs:
            is_list = tensor.shape.rank in (None, 0, 1)
            self._keep(tensor, Trait("random") if is_list else Trait("rows"))

    def _keep(self, tensor: Any, trait: Trait | None) -> None:
        if trait is None or trait == RELATED:
            return
        if trait.kind == "rows":
            rank = tensor.shape.rank
            if rank is None or not 0 <= trait.axis < rank or not self._fits(tensor, trait.axis):
                return
        self._set(tensor, trait)

    def _fits(self, tensor: Any, axis: int) -> bool:
        size = tensor.shape[axis]
        if self._length is None:
            return size is None
        return size is None or size % self._length == 0

    def _by_shape(self, op: Operation, tensor: Any) -> Trait | None:
        """The only axis of the batch's length is the batch's, where nothing else tells."""
        shape, kinds = tensor.shape, {trait.kind for trait in op.traits if trait}
        if shape.rank is None or op.kind in ("Shape", "Where"):
            return None
        if self._length is not None:
            of_rows = [op.inputs[i].shape.as_list() for i, _ in op.rows]
            if not of_rows or any(sizes.count(self._length) != 1 for sizes in of_rows):
                return None
        elif not kinds & {"rows", "count", "shape"}:
            return None
        sizes = shape.as_list()
        one = sizes.count(self._length) == 1
        return Trait("rows", sizes.index(self._length), None) if one else None

    def _set(self, tensor: Any, trait: Trait) -> None:
        self._traits[key_of(tensor)] = trait
        # Kept alive, so that no later tensor gets the same `id`.
        self._kept.append(tensor)


def key_of(tensor: Any) -> Any:
    """What tells tensors of graphs, or without a graph, from each other."""
    return (tensor.graph, tensor.name) if tf.is_symbolic_tensor(tensor) else (None, id(tensor))


def called(model: keras.Model, rows: Any, training: bool, scope: CatchingScope) -> tuple[Any, bool]:
    """The model's outputs for some rows, and whether theirs stand in the order of the examples.

    The rows are followed once for each graph and kind of step; the scope is the model's.
    """
    eager = tf.executing_eagerly()
    # Without a graph every step would pay for it, and the first one has told.
    answers = _seen.setdefault(model, {}) if eager else {}
    if training in answers:
        return model_internals.called(model, rows, training), answers[training]
    flow, graph = RowsFlow(rows), tf.compat.v1.get_default_graph()
    before = 0 if eager else len(graph.get_operations())
    with step_hooks.noted_operations(flow.note) if eager else contextlib.nullcontext():
        outputs = model_internals.called(model, rows, training)
    if not eager:
        flow.note_all(graph.get_operations()[before:])
        for value in scope.new_values:
            flow.find_stored(value, value.op)
    answers[training] = all(map(flow.in_order, keras.tree.flatten(outputs)))
    flow.find_sums(model.losses)
    tell(model, flow, ADVICE)
    return outputs, answers[training]


def tell(model: keras.Model, flow: RowsFlow, advice: str) -> None:
    """Say once for each model what relates its rows."""
    found = [] if model in _told else [*flow.found, *padded_texts(model)]
    if leaves_padding_out(model):
        found = [each for each in found if each.kind != PADDING]
    if not found:
        return
    _told.add(model)
    kind, where = found[0]
    logger.warning(RELATES, f"`{model.name}`", where, kind, advice)


def trait_of(op: Operation) -> Trait | None:
    if op.kind in OF_SHAPES_ONLY:
        return of_shape(op)
    if op.rows:
        # After any other operation the axis is where it was, which the shapes confirm.
        return RULES[op.kind](op) if op.kind in RULES else op.rows[0][1]
    return of_figures(op) if op.figures else of_others(op)


def of_shape(op: Operation) -> Trait | None:
    """Shapes and sizes: of what has rows they count them."""
    for _, trait in op.rows:
        return {"Shape": trait._replace(kind="shape"), "Size": Trait("count")}.get(op.kind)
    return None


def of_figures(op: Operation) -> Trait | None:
    """Operations on means, sums and counts: what is linear keeps them."""
    figures, counts = op.figures, op.counts
    first = next((t for t in figures if t.kind == "sum"), figures[0])
    if op.has_row:
        return RELATED
    if op.kind in DIVISIONS:
        if op.divides_by_rows and first.kind == "sum":
            return first._replace(kind="mean")
        return RELATED if op.traits[1] else first
    if op.kind in LINEAR or (op.kind in PRODUCTS and len(figures) == 1 and not counts):
        return first
    return RELATED


def of_others(op: Operation) -> Trait | None:
    """Operations on totals, of which a share's number makes no mean; on chance; on counts."""
    first = next(filter(None, op.traits))
    if op.has_row:
        return ROW
    if first.kind in ("random", "chosen"):
        return CHOSEN if op.kind == "Where" else first
    if first.kind != "total":
        return of_counts(op)
    if op.kind in DIVISIONS and op.divides_by_rows:
        return RELATED
    return first if op.kind in ("Identity", "Cast") else None


def of_counts(op: Operation) -> Trait | None:
    """Operations on shapes and numbers of rows."""
    trait = op.traits[0] if op.traits else None
    if trait is not None and trait.kind == "shape":
        if op.kind == "Prod":
            return Trait("count")
        begin = op.numbers(1) if op.kind == "StridedSlice" else None
        if begin is None:
            return None
        return Trait("count") if begin[0] == trait.axis else None
    counts = op.counts
    # Lengths are compared in assertions, which put nothing into the numbers.
    if not counts or op.outputs[0].dtype == tf.bool:
        return None
    if op.kind in DIVISIONS and op.traits[1] is not None:
        return RELATED
    if op.kind in (*DIVISIONS, "FloorDiv", "TruncateDiv", "Sub", "AddV2", "Minimum"):
        return Trait("part")
    return counts[0] if op.kind in ("Cast", "Identity", "Mul", "Pack", "Reshape") else None


def elementwise(op: Operation) -> Trait | None:
    """Operations that broadcast."""
    rows = op.rows
    if op.figures or op.has_row:
        return RELATED
    if op.kind in DIVISIONS and op.counts:
        return RELATED
    # Counted from the last axis, by which broadcasting lines shapes up.
    places = {op.inputs[i].shape.rank - trait.axis for i, trait in rows}
    if len(places) > 1:
        return RELATED
    known = {trait.blocks for _, trait in rows}
    rank = max(t.shape.rank or 0 for t in op.inputs)
    return rows[0][1]._replace(
        axis=rank - places.pop(), blocks=known.pop() if len(known) == 1 else None
    )


def reduction(op: Operation) -> Trait | None:
    """Reductions along some axes."""
    trait, axes = op.traits[0], op.axes(1)
    if trait is None or axes is None:
        return None
    if trait.axis in axes:
        kind = {"Mean": "mean", "Sum": "sum"}.get(op.kind)
        return Trait(kind) if kind and trait.kind == "rows" else RELATED
    if op.attribute("keep_dims"):
        return trait
    return trait._replace(axis=trait.axis - sum(a < trait.axis for a in axes))


def along_last(op: Operation) -> Trait | None:
    trait = op.traits[0]
    return RELATED if trait and trait.axis == op.inputs[0].shape.rank - 1 else trait


def along(index: int) -> Callable[[Operation], Trait | None]:
    """Operations along axes that an input names."""

    def rule(op: Operation) -> Trait | None:
        trait, axes = op.traits[0], op.axes(index)
        if trait is None or trait.kind != "rows":
            return None
        return RELATED if axes and trait.axis in axes else trait

    return rule


def shuffled(op: Operation) -> Trait | None:
    """Another order along the first axis."""
    trait = op.traits[0]
    return trait if trait and trait.axis else RELATED


def pooled(op: Operation) -> Trait | None:
    """Sums over rows that belong together, and what is different among them."""
    trait = op.traits[0]
    return RELATED if trait and trait.kind == "rows" and trait.axis == 0 else trait


def normalized(op: Operation) -> Trait | None:
    """Batch normalisation by TensorFlow."""
    return RELATED if op.attribute("is_training", True) else op.traits[0]


CHOSEN = Trait("chosen")
"""The numbers of rows that fulfil a condition, which are like all others."""

OF_SHAPES_ONLY = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}

ELEMENTWISE = """
    Add AddV2 Sub Mul RealDiv Div DivNoNan FloorDiv FloorMod Mod TruncateDiv Maximum Minimum Pow
    SquaredDifference Greater GreaterEqual Less LessEqual Equal NotEqual LogicalAnd LogicalOr Select
    SelectV2 Xdivy Xlogy Xlog1py Atan2 AddN
""".split()

LINEAR = set(
    """
    Identity IdentityN Cast Neg Add AddV2 Sub AddN Reshape ExpandDims Squeeze Transpose Sum Mean
    StopGradient PreventGradient CheckNumerics EnsureShape Pack ConcatV2 BroadcastTo Tile
    StridedSlice Slice GatherV2 Select SelectV2 Snapshot
    """.split()
)

PRODUCTS = {"Mul", "MatMul", "BatchMatMulV2", "Einsum", "MulNoNan"}

DIVISIONS = ("RealDiv", "Div", "DivNoNan")

REDUCTIONS = "Mean Sum Prod Max Min Any All EuclideanNorm ArgMax ArgMin".split()

RULES: dict[str, Callable[[Operation], Trait | None]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2"), along_last),
    **dict.fromkeys(("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2"), along(1)),
    "Roll": along(2),
    "L2Loss": lambda op: Trait("sum"),
    "RandomShuffle": shuffled,
    "Where": lambda op: CHOSEN,
    **MOVES,
    **dict.fromkeys(("SegmentSum", "UnsortedSegmentSum", "SegmentMean", "Unique"), pooled),
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), normalized),
}


PADDING = "padding to the longest of a batch"


def leaves_padding_out(model: keras.Model) -> bool:
    """Whether a mask makes the length of the padding irrelevant."""
    layers = model_internals.layers_of(model)
    return any(isinstance(x, keras.layers.Masking) or getattr(x, "mask_zero", 0) for x in layers)


def pads_to_longest(shape: tf.Tensor) -> bool:
    """Whether ragged rows become dense without a length that is given for all batches."""
    known = tf.get_static_value(shape)
    return known is not None and (known.ndim == 0 or -1 in known[1:])


def padded_texts(model: keras.Model) -> list[Finding]:
    """Layers that pad texts to the longest of a batch."""
    layers = model_internals.layers_of(model)
    texts = [layer for layer in layers if isinstance(layer, keras.layers.TextVectorization)]
    configs = [(layer.name, layer.get_config()) for layer in texts]
    return [
        Finding(PADDING, f"`{name}`")
        for name, config in configs
        if config["output_mode"] == "int"
        and not config["ragged"]
        and config["output_sequence_length"] is None
    ]
