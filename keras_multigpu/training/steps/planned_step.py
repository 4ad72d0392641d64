"""`PlannedStep`: a step that is split, but never runs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.conversions import Exchange
from keras_multigpu.partition.cost import HEAVY
from keras_multigpu.partition.facts import BRANCHES, GraphFacts
from keras_multigpu.partition.layouts import Rows as InRows
from keras_multigpu.partition.planner import CannotSplit
from keras_multigpu.partition.sizes import AnySize, Size
from keras_multigpu.training.exchange.stages import made_of, stage_numbers, summing
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.split_step import SplitStep, is_composite
from keras_multigpu.training.variables.owners import Slots

OWN = "own "
"""How the number of examples that one part has of a batch is named, before the batch's name."""


class PlannedStep(SplitStep):
    """A step that is split over any number of replicas and never runs, to see what it would cost.

    Args:
        request: The step.
        replicas: How many replicas to plan for.

    Attributes:
        cuts: The names of the operations that mark sums over replicas in a part's graph.
    """

    def __init__(self, request: StepRequest, replicas: int) -> None:
        self._planned = replicas
        super().__init__(request)

    def _replicas(self) -> int:
        return self._planned

    def _traced(self, local: Callable[..., Any], args: Sequence[Any], *others: Any) -> Any:
        self.cuts: set[str] = set()

        def cut(tensors: list[tf.Tensor], of_pieces: bool = False) -> list[tf.Tensor]:
            self.cuts.update(tensor.op.name for tensor in tensors)
            return tensors

        with summing(cut), graph_internals.single_device():
            return tf.function(local, autograph=False).get_concrete_function(*args)

    def _share_out(self, sums: Exchange) -> None:
        # A plan moves nothing.
        pass

    def _say_alone(self, reason: CannotSplit) -> None:
        pass

    @property
    def batch_names(self) -> list[str]:
        """The names of the sizes of its batches."""
        return self._batches

    @property
    def leaves(self) -> list[tuple[list[AnySize | None] | None, tf.DType]]:
        """The lengths of the axes of what a part is given of a batch, and the types."""
        specs = tf.nest.flatten(self._specs, expand_composites=True)
        split = self.alone is None
        found = []
        for leaf, spec, name in zip(self._described, specs, self._names_of_rows(), strict=True):
            dims = None if leaf.dims is None else list(leaf.dims)
            if dims and name is not None:
                dims[0] = Size.of(OWN + name if split else name)
            found.append((dims, spec.dtype))
        return found

    def _names_of_rows(self) -> Iterator[str | None]:
        """Of which batch each tensor of a batch has rows; None of what is not cut."""
        for leaf, name in zip(self._leaves, self._batch_of, strict=True):
            parts = tf.nest.flatten(leaf, expand_composites=True)
            yield from [None if is_composite(leaf) else name] * len(parts)

    @property
    def pieces_wait(self) -> bool:
        """Whether pieces of a share are kept until all of them have come as far."""
        if self.alone is not None:
            return False
        graph = self._local.graph
        places = [
            4 + n for n, leaf in enumerate(self._described) if isinstance(leaf.layout, InRows)
        ]
        shift = len(self._lengths(self._specs))
        inputs = {graph.inputs[shift + place].op.name for place in places}
        numbers = stage_numbers(graph, self.cuts)
        of_piece = made_of(graph, inputs, self.cuts)
        # On CPUs convolutions are inside of conditions.
        kinds = {*HEAVY, *BRANCHES}
        return any(
            op.type in kinds and numbers.get(op.name) and op.name in of_piece
            for op in graph.get_operations()
        )

    def divided(self) -> dict[int, int]:
        """The place of the replica that keeps a variable of an optimizer alone, by its first copy.

        There are none unless replicas divide the optimizer.
        """
        if self.alone is not None or not self._of_weights:
            return {}
        placement = self._request.placement
        slots = Slots(self._model, self._of_weights, self._devices, self._copies, placement)
        found = slots.find(self._step.facts, self._step.numbers_of_inputs)
        weights = {id(copies_of(v)[0]) for v in self._model.trainable_variables}
        firsts = {id(self._copies[number][0]): place for number, place in found.items()}
        return {first: place for first, place in firsts.items() if first not in weights}

    def facts_of_part(self) -> GraphFacts:
        """What is known of a part's graph, where its examples are `OWN` many."""
        dims = [dims for dims, _ in self.leaves]
        if self._unsplit is not None:
            graph = self._whole.graph
            dims += [None] * (len(graph.inputs) - len(dims))
            return GraphFacts(graph, dims, self._sizes())
        graph = self._local.graph
        own = [Size.of(OWN + name) for name in self._batches]
        totals = [Size.of(name) for name in self._batches]
        given: list[Any] = [0, [[each, 0] for each in own], totals, own[0]]
        given += [Size.of(name) for name in sorted(self._lengths(self._specs))]
        known = {place: np.array(value, object) for place, value in enumerate(given)}
        dims = [*(list(value.shape) for value in known.values()), *dims]
        dims += [None] * (len(graph.inputs) - len(dims))
        return GraphFacts(graph, dims, self._sizes(), known)
