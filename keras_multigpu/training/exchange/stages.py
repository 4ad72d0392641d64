"""A function with sums over replicas in its middle, traced once for all replicas.

Where the function sums, its graph is cut. All replicas run one stage after another, each on its
device; between two stages they sum what the cuts ask for:

    stage 0 ──> sum ──> stage 1 ──> sum ──> stage 2

An operation runs in the first stage that has all its inputs, so independent sums fall between
the same two stages and travel in one pack.

A replica may take its share in pieces. It then runs each stage for one piece after another and adds
up their summands, before it sums these with the other replicas. What is the same for all pieces it
computes once:

    stage 0 of piece 0 ──> stage 0 of piece 1 ──> sum ──> stage 1
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.training.exchange.cuts import (
    ancestors,
    descendants,
    stage_numbers,
)
from keras_multigpu.training.exchange.exchange import Parts, rows_of
from keras_multigpu.training.exchange.packing import filling
from keras_multigpu.training.exchange.stage import RunStage, Stage, definitions_of, size_of
from keras_multigpu.training.exchange.sums import Cuts, Sums

Takers = Mapping[str, Callable[[int, tf.Tensor], None] | None]
"""Who takes results, given a replica's place, by name; None for one that nobody takes."""

AT_ONCE = 2**25
"""How many bytes of such results may be there at a time."""


def trace_stages(
    function: Callable[..., Any],
    specs: Sequence[Any],
    cuts: Cuts,
    jit_compile: bool,
    of_piece: Sequence[int] = (),
    has_effects: bool = True,
) -> "Stages":
    """Trace a function for arguments of these specs, cut where replicas sum.

    TensorFlow optimizes the graph once, and not for each replica, unless XLA compiles it. It is
    traced outside any strategy; called inside a replica it runs on the replica's device.

    Args:
        cuts: What the function exchanges.
        of_piece: Which tensors of the arguments differ between the pieces of a share.
        has_effects: Whether it does more than compute, in an order that must be kept.
    """
    attributes = {} if has_effects else graph_internals.WITHOUT_ORDER

    def trace(part: Callable[..., Any], part_specs: Sequence[Any]) -> Any:
        with graph_internals.single_device():
            return tf.function(
                part,
                jit_compile=jit_compile,
                autograph=False,
                experimental_attributes=attributes,
            ).get_concrete_function(*part_specs)

    whole = trace(function, specs)
    inputs = {whole.graph.inputs[place].op.name for place in of_piece}
    return Stages(whole, cuts, trace if jit_compile else None, inputs)


class Stages:
    """The stages of a function, which a replica runs one after another.

    Args:
        whole: The function, traced.
        cuts: Where it sums.
        compiled: Lets XLA compile a function for arguments of some specs; None without XLA.
        of_piece: The names of the inputs that differ between the pieces of a share.
    """

    def __init__(
        self,
        whole: Any,
        cuts: Cuts,
        compiled: Callable[[Callable[..., Any], Sequence[Any]], Any] | None,
        of_piece: Collection[str],
    ) -> None:
        self.graph = whole.graph
        self.structured_outputs = whole.structured_outputs
        # Functions that its operations call live as long as it does.
        self._whole = whole
        names = {cut.name for cut in cuts.made}
        outside = names | {tensor.op.name for tensor in self.graph.inputs}
        sums = names - cuts.gathers.keys()
        self._gathers, self._scatters = cuts.gathers, cuts.scatters
        self._due = {name: due.name for name, due in cuts.due.items()}
        self._places, self._pieces = cuts.places, cuts.pieces
        numbers = stage_numbers(self.graph, names)
        # What no sum needs comes after all of them: an update that is computed as soon as its
        # gradient is there would lie about until the last one is.
        feeding = ancestors([cut for cut in cuts.made if cut.name in sums & numbers.keys()])
        last = max((numbers[name] + 1 for name in sums & numbers.keys()), default=0)
        numbers = stage_numbers(self.graph, names, numbers.keys() - feeding.keys(), last)
        of_pieces = descendants(self.graph, of_piece, names)
        # With pieces, each stage comes in two: what all pieces have in common, and each piece.
        halves = 2 if of_piece else 1
        count = halves * (1 + max(numbers.values()))
        self._stages = [Stage(of_piece=place % halves == 1) for place in range(count)]
        made = {op.name: at for at, op in enumerate(self.graph.get_operations())}
        for operation in self.graph.get_operations():
            name = operation.name
            if name in numbers and name not in outside:
                place = halves * numbers[name] + (name in of_pieces)
                self._stages[place].operations.append(operation)
        # In the order in which their tensors are computed, not in which they were requested.
        for cut in sorted(cuts.made, key=lambda cut: made[cut.inputs[0].op.name]):
            if cut.name in numbers:
                stage = self._stages[halves * (numbers[cut.name] + 1) - 1]
                stage.cuts.append(cut)
                if cut.name in cuts.gathers:
                    stage.alike.add(cut.inputs[0].name)
        self._define(self._stages, compiled)
        self._exchanges = [
            [part for cuts_ in groups for part in grouped(cuts_, self._due)]
            for groups in exchanges(self._stages, {*cuts.gathers, *cuts.scatters})
        ]

    def _define(self, stages: Sequence[Stage], compiled: Any) -> None:
        """Make TensorFlow functions of the stages."""
        wanted = {*(tensor.name for tensor in self.graph.outputs), *self._due.values()}
        functions = definitions_of(self._whole, stages, wanted)
        if compiled is None:
            # Once for all replicas: TensorFlow would do it for each call, which was 22 of the 67 s
            # of processor time of a first step on 8 replicas. This takes 1.1 s.
            functions = graph_internals.optimized_functions(functions, self.graph.as_graph_def())
        elif any(stage.passes_lists for stage in stages):
            # XLA has no way to hand on a list, such as a loop makes for the way back. TensorFlow
            # runs these stages, but for what only XLA can do, or does in another way.
            only_xla = sorted(filter(needs_xla, types_in(self.graph)))
            if only_xla:
                raise CannotSplit(f"XLA cannot sum between a loop and its gradient: {only_xla}")
        for stage, function in zip(stages, functions, strict=True):
            stage.define(function, compiled)

    def __call__(
        self,
        shares: Sequence[Sequence[Any]],
        sums: Sums,
        run_stage: RunStage = Stage.run,
    ) -> list[list[Any]]:
        """What the function returns for each piece of each replica's share.

        Args:
            shares: The arguments for each piece, of each replica of this process.
            sums: Sums over all replicas.
            run_stage: Runs a stage for all pieces of a share.
        """
        if not tf.executing_eagerly():
            # The calls that this graph makes need the functions of the stages.
            tf.compat.v1.add_to_collection("keras_multigpu/stages", self)
        on_each = sums.exchange.on_each
        known = [[self._inputs(args) for args in pieces] for pieces in shares]
        summands: list[dict[str, tf.Tensor]] = [{} for _ in shares]
        after_sums = self.after_sums

        def run(
            stage: Stage, pieces: list[dict[str, tf.Tensor]], packs: Sequence[tf.Tensor]
        ) -> dict[str, tf.Tensor]:
            # No new value before it may be assigned: they would pile up.
            with tf.control_dependencies(packs if stage in after_sums else []):
                return run_stage(stage, pieces)

        for stage, all_cuts in zip(self._stages, self._exchanges, strict=True):
            made = on_each(functools.partial(run, stage), known, sums.packs)
            for of_replica, new in zip(summands, made, strict=True):
                of_replica |= new
            for cuts in all_cuts:
                names = [cut.inputs[0].name for cut in cuts]
                parts = [[own[name] for name in names] for own in summands]
                due = self._due.get(cuts[0].name)
                if due is None:
                    summed = self._exchanged(cuts[0].name, parts, sums)
                else:
                    summed = sums.if_due(known[0][0][due], parts)
                outputs = [cut.outputs[0].name for cut in cuts]
                for pieces, wholes in zip(known, summed, strict=True):
                    for piece in pieces:
                        piece |= dict(zip(outputs, wholes, strict=True))
        return [self._results(pieces) for pieces in known]

    def _exchanged(self, cut: str, parts: Parts, sums: Sums) -> Parts:
        """What replicas have after the exchange that a cut begins."""
        if cut in self._gathers:
            wholes = sums.gather([part for (part,) in parts], self._gathers[cut])
        elif cut in self._scatters:
            wholes = sums.scatter([part for (part,) in parts], self._scatters[cut])
        else:
            return sums(parts)
        return [[whole] for whole in wholes]

    def run_in_turn(
        self,
        all_args: Sequence[Any],
        takers: Takers,
        in_rows: Mapping[str, int] | None = None,
    ) -> list[Any]:
        """As a call, without a graph around it, in little memory.

        Args:
            all_args: The arguments for each piece of each replica's share.
            takers: Who takes results, which are then not returned: rows of variables from each
                replica of a process, others, which are the same for all, from the first.
            in_rows: How many bytes those have that are rows of variables.
        """
        in_rows = in_rows or {}
        # Pieces, and replicas of other processes, have the same rows.
        once = {place * self._pieces: place for place in range(self._places)}
        results = {tensor.name for tensor in self.graph.outputs} - takers.keys()
        known = [self._inputs(args) for args in all_args]
        left = {
            (name, number): functools.partial(taker, place)
            for name, taker in takers.items()
            for number, place in (once.items() if name in in_rows else [(0, 0)])
            if taker is not None
        }
        # Backwards, as what nobody takes needs nothing.
        in_turn: list[tuple[list[Stage], list[tf.Operation]]] = []
        last: dict[str, int] = {}
        for number in reversed(range(len(self._stages))):
            stage, needed = self._stages[number], {*last, *results, *(name for name, _ in left)}
            cuts = [cut for cut in stage.cuts if cut.outputs[0].name in needed]
            summands = [cut.inputs[0].name for cut in cuts]
            parts = self._apart(stage, {*last, *results, *summands}, takers, in_rows)
            for name in [*summands, *(name for part in parts for name in part.inputs)]:
                last.setdefault(name, number)
            in_turn.insert(0, (parts, cuts))

        def take(name: str, value: tf.Tensor, number: int) -> None:
            if (name, number) in left:
                left.pop((name, number))(value)

        for number, (parts, cuts) in enumerate(in_turn):
            sums: dict[str, tf.Tensor] = {}
            gathered: dict[str, list[tf.Tensor]] = {name: [] for name in self._stages[number].alike}
            for place, each in enumerate(known):
                for part in parts:
                    if part is not parts[0] and all(
                        (tensor.name, place) not in left for tensor in part.outputs
                    ):
                        continue
                    made = part.call_eagerly(each)
                    for name in [name for name in made if name in takers and name not in last]:
                        take(name, made.pop(name), place)
                    each |= made
                    del made
                for name in dict.fromkeys(cut.inputs[0].name for cut in cuts):
                    if name in gathered:
                        gathered[name].append(each[name])
                    else:
                        sums[name] = sums[name] + each[name] if place else each[name]
                    if last[name] == number and name not in results:
                        del each[name]
            for cut in cuts:
                name = cut.inputs[0].name
                axis = self._gathers.get(cut.name)
                rows = [gathered[name][place] for place in once] if axis is not None else []
                whole = sums[name] if axis is None else tf.concat(rows, axis.axis)
                for place, each in enumerate(known):
                    each[cut.outputs[0].name] = whole
                    if cut.name in self._scatters:
                        own = place // self._pieces % self._places
                        each[cut.outputs[0].name] = rows_of(
                            whole, self._scatters[cut.name], own, self._places
                        )
            kept = results | {name for name, _ in left}
            for each in known:
                for name in [name for name in each if last.get(name) == number]:
                    if name not in kept:
                        del each[name]
        # Some are inputs or sums, or other stages need them.
        for name, number in list(left):
            take(name, known[number][name], number)
        return self._results(known, without=takers)

    def _results(
        self, known: Sequence[dict[str, tf.Tensor]], without: Collection[str] = ()
    ) -> list[Any]:
        """The results for each piece or replica, with None for those of some names."""
        return [
            tf.nest.map_structure(
                lambda leaf, each=each: (
                    None if leaf is None or leaf.name in without else each[leaf.name]
                ),
                self.graph.structured_outputs,
                expand_composites=True,
            )
            for each in known
        ]

    def _apart(
        self,
        stage: Stage,
        needed: Collection[str],
        takers: Takers,
        in_rows: Mapping[str, int],
    ) -> list[Stage]:
        """A stage without the outputs that it need not have at a time, and with some of them each.

        Args:
            needed: The names of those that others need. If the rest is small, the stage stays
                whole.
            takers: Who takes the rest, as in `run_in_turn`.
            in_rows: As there.
        """
        sizes = {t.name: in_rows.get(t.name, size_of(t)) for t in stage.outputs}
        rest = {name: size for name, size in sizes.items() if name not in needed}
        taken = {name: size for name, size in rest.items() if takers.get(name) is not None}
        # What only waits for new values, and nobody takes, would keep all of them.
        waits = rest.keys() == sizes.keys() and not taken
        if sum(rest.values()) <= AT_ONCE and not waits:
            return [stage]
        of_rows = {name: taken[name] for name in taken if name in in_rows}
        of_first = {name: taken[name] for name in taken if name not in in_rows}
        groups = [needed, *in_groups(of_rows), *in_groups(of_first)]
        must_run = {operation.name for operation in self.graph.control_outputs}
        effects = [op for op in stage.operations if op.name in must_run]
        outside = {tensor.op.name for tensor in stage.inputs.values()}
        made = []
        for group in groups:
            wanted = [tensor for tensor in stage.outputs if tensor.name in group]
            kept = effects if group is needed else []
            inside = ancestors([*(tensor.op for tensor in wanted), *kept], stop=outside)
            part = Stage(operations=[op for op in stage.operations if op.name in inside])
            (definition,) = definitions_of(self._whole, [part], [each.name for each in wanted])
            part.define(definition)
            made.append(part)
        return made

    @property
    def exchanged(self) -> list[tuple[str, list[tf.Operation]]]:
        """What replicas exchange, in turn: "sum" or "gather", and the cuts that travel together."""
        return [
            ("gather" if cuts[0].name in self._gathers else "sum", cuts)
            for all_cuts in self._exchanges
            for cuts in all_cuts
        ]

    @property
    def after_sums(self) -> list[Stage]:
        """The stages after all sums: the last part of an update."""
        summing = [
            number
            for number, stage in enumerate(self._stages)
            if any(cut.name not in self._gathers for cut in stage.cuts)
        ]
        return self._stages[max(summing, default=-1) + 1 :]

    def _inputs(self, args: Any) -> dict[str, tf.Tensor]:
        """The values of the graph's inputs for these arguments, by name."""
        given = [leaf for leaf in tf.nest.flatten(args, expand_composites=True) if leaf is not None]
        given += self._whole.captured_inputs
        return {
            placeholder.name: tf.convert_to_tensor(value, placeholder.dtype)
            for placeholder, value in zip(self.graph.inputs, given, strict=True)
        }


def exchanges(
    stages: Sequence[Stage], alone: Collection[str] = ()
) -> list[list[list[tf.Operation]]]:
    """What replicas exchange after each stage: lists of cuts, which are packed by themselves.

    Collectives run one after another on each device, in the order in which they are called. What
    the next stage needs comes first. Gradients, which only the update needs, wait until they fill
    a bucket: if all of them waited for the update, their sums could hide behind nothing.

    Args:
        alone: The names of the cuts that no pack is for, as they do more than sum.
    """
    due = due_times(stages)
    late = [
        cut
        for number, stage in enumerate(stages)
        for cut in stage.cuts
        if due[cut.name] > number + 1 and cut.name not in alone
    ]
    left = sum(map(bytes_of_cut, late))
    found: list[list[list[tf.Operation]]] = []
    waiting: list[tf.Operation] = []
    for number, stage in enumerate(stages):
        waiting += [cut for cut in stage.cuts if cut.name not in alone]
        needed = [cut for cut in waiting if due[cut.name] <= number + 1]
        waiting = [cut for cut in waiting if due[cut.name] > number + 1]
        others = [cut for cut in stage.cuts if cut.name in alone]
        others.sort(key=lambda cut: due[cut.name])
        found.append([*([needed] if needed else []), *([cut] for cut in others)])
        size = sum(map(bytes_of_cut, waiting))
        if size and size >= filling(left):
            found[-1].append(waiting)
            waiting, left = [], left - size
    return found


def grouped(cuts: Sequence[tf.Operation], by: Mapping[str, str]) -> list[list[tf.Operation]]:
    """Cuts that travel together, in groups that wait for the same."""
    groups: dict[str | None, list[tf.Operation]] = {}
    for cut in cuts:
        groups.setdefault(by.get(cut.name), []).append(cut)
    return list(groups.values())


def bytes_of_cut(cut: tf.Operation) -> int:
    """How many bytes a cut sums; 0 if it sums rows, whose number is open."""
    (tensor,) = cut.inputs
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def due_times(stages: Sequence[Stage]) -> dict[str, int]:
    """The first stage that needs each sum, by the name of its cut."""
    # What is a result, and nothing else, travels with the last ones.
    last = max((number + 1 for number, stage in enumerate(stages) if stage.cuts), default=0)
    due = {cut.name: last for stage in stages for cut in stage.cuts}
    for number, stage in reversed(list(enumerate(stages))):
        for name in stage.names_needed:
            cut = name.rpartition(":")[0]
            if cut in due:
                due[cut] = number
    return due


def in_groups(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in groups of at most `AT_ONCE` bytes, or of one name."""
    groups: list[list[str]] = []
    held = 0
    for name, size in sizes.items():
        if not groups or held + size > AT_ONCE:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def types_in(graph: Any) -> set[str]:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for each in definition.library.function for n in each.node_def)]
    return {node.op for node in nodes}


def needs_xla(kind: str) -> bool:
    """Whether an operation's type has other numbers without XLA, or no kernel at all."""
    return kind.startswith("Xla") or "Normal" in kind or "Multinomial" in kind
