"""`Planned`: a program with the layouts of its tensors, and how replicas share its operations."""

from collections.abc import Mapping

from keras_multigpu.partition.facts.axes import PRODUCTS
from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.facts.families import ELEMENTWISE
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout, is_one_shard, is_sharded
from keras_multigpu.partition.program import (
    ASSIGNMENTS,
    BRANCH,
    COMPILED,
    WRITES,
    Operation,
    Program,
    Tensor,
    has_effect,
)
from keras_multigpu.partition.rules.moments import Moments
from keras_multigpu.partition.rules.plan import Plan
from keras_multigpu.partition.rules.sums import LINEAR, SCALED, SHAPES, is_finite_but
from keras_multigpu.partition.sizes import elements

# Everything that may come between an open sum and the place where it is taken.
OPEN = {*LINEAR, *SCALED, *SHAPES, *PRODUCTS, "Cast", *WRITES, COMPILED}
ADDED = {"AddN", "AddV2", "Add", "Sub"}
# The same numbers in another shape.
MOVED = {"Identity", "Reshape", "ExpandDims", "Squeeze", "Transpose"}


class Planned:
    """The step, or a program that an operation in it runs, and the plans of its operations.

    Args:
        program: The program.
        facts: The facts of the step.
        state: The layouts of the variables' values before it runs, by number.
        in_loop: Whether it is the body of a loop.
        is_called: Whether its results are used where it is called.
        may_exchange: Whether replicas can exchange values in it, as they cannot in loops and
            branches.

    Attributes:
        state: The layouts of their present values; in the end, of the last ones.
        plans: How replicas share each operation.
        inner: The programs that an operation runs, planned: a loop's condition and body, branches
            in the order of their numbers, or what XLA compiles.
        layouts: The layouts of its tensors.
        free: The tensors of which each replica can make any part at no cost. Their layouts say
            which part most users want.
        buckets: The bucket of each operation that gathers what replicas divide, see `gathering`.
        scattered: The open sums of which replicas need their rows of a variable, and nothing else.
        moments: The means and variances that are computed together, by either.
        once: The operations that one replica runs for all.
        exchanges: Whether its plans exchange values.
    """

    def __init__(
        self,
        program: Program,
        facts: Facts,
        state: Mapping[int, Layout],
        *,
        in_loop: bool = False,
        is_called: bool = False,
        may_exchange: bool = False,
    ) -> None:
        self.program, self.facts = program, facts
        self.given, self.state = dict(state), dict(state)
        self.in_loop, self.is_called, self.may_exchange = in_loop, is_called, may_exchange
        self.plans: dict[Operation, Plan] = {}
        self.inner: dict[Operation, tuple[Planned, ...]] = {}
        self.layouts: dict[Tensor, Layout] = {}
        self.free: set[Tensor] = set()
        self.buckets: Mapping[Operation, int] = {}
        self.scattered: set[Tensor] = set()
        self.moments: dict[Operation, Moments] = {}
        self.once: set[Operation] = set()
        self.exchanges = False
        self._outputs = set(program.outputs)
        self._open: dict[Tensor, bool] = {}
        self._kept: dict[Tensor, Layout] = {}
        self._has_shards = any(map(is_sharded, state.values()))

    @property
    def outs(self) -> list[Layout]:
        """The layouts of its results."""
        return [self.layouts[tensor] for tensor in self.program.outputs]

    def stays_open(self, tensor: Tensor) -> bool:
        """Whether to pass an open sum on rather than take it.

        That is better if all its users can work with parts, and either add several of them or make
        them smaller: then one sum is enough, or a smaller one.
        """
        if tensor in self._outputs and not (self.in_loop or self.is_called):
            return False
        if tensor not in self._open:
            # In a loop no sum can be taken.
            self._open[tensor] = all(
                op.type in OPEN and (self.in_loop or self._gains(tensor, op)) for op in tensor.users
            )
        return self._open[tensor]

    def _gains(self, tensor: Tensor, user: Operation) -> bool:
        """Whether it is better to sum the results of a user than its inputs."""
        if user.type == COMPILED or user.type in SHAPES:
            return True
        is_product = user.type in SCALED or user.type in PRODUCTS
        if user.type in WRITES or (is_product and user.inputs.count(tensor) > 1):
            return False
        if user.type in PRODUCTS and not is_finite_but(user.inputs.index(tensor), user):
            return False
        others = [each for each in user.inputs if each is not tensor]
        if user.type in ADDED and others:
            # The layouts of later operations are not known yet; most of what is added to an open
            # sum is one.
            return any(self.layouts.get(each, PARTIAL) == PARTIAL for each in others)
        own, *made = (elements(self.facts.dims(each) or []) for each in (tensor, *user.outputs))
        if sum(made) != own:
            return sum(made) < own
        if self._has_shards and user.type in MOVED and len(tensor.users) == 1:
            # One sum either way. Behind it, rows of a variable may be enough.
            return True
        return all(self.stays_open(each) for each in user.outputs)

    def kept_of(self, tensor: Tensor) -> Layout:
        """What a replica needs of an open sum: its rows of the variable that this changes, or all.

        Whether these are enough for an operation in between does not matter: a sum is a scatter and
        a gather.
        """
        if not self._has_shards:
            return REPLICATED
        if tensor not in self._kept:
            layouts = (self._kept_by(op, tensor) for op in tensor.users)
            self._kept[tensor] = next(filter(is_one_shard, layouts), REPLICATED)
        return self._kept[tensor]

    def _kept_by(self, op: Operation, tensor: Tensor) -> Layout:
        """What a replica needs of what an operation makes of a tensor, number by number."""
        if op.type == BRANCH and tensor in op.inputs[1:]:
            place = op.inputs.index(tensor, 1) - 1
            found = (self.kept_of(inner.inputs[place]) for inner in op.inner)
            return next(filter(is_one_shard, found), REPLICATED)
        if op.type == "IdentityN":
            return self.kept_of(op.outputs[op.inputs.index(tensor)])
        changed = op.inputs[0] if op.type in ASSIGNMENTS else op.outputs[0] if op.outputs else None
        if changed is None or self.facts.dims(changed) != self.facts.dims(tensor):
            return REPLICATED
        if changed.variable is not None:
            return self.given.get(changed.variable, REPLICATED)
        return self.kept_of(changed) if op.type in ELEMENTWISE else REPLICATED

    def is_asserted(self, tensor: Tensor) -> bool:
        """Whether a condition serves assertions alone, as those of `tf.debugging` are."""
        return tensor not in self._outputs and all(map(self._asserts, tensor.users))

    def _asserts(self, op: Operation) -> bool:
        """Whether all that an operation does is to fail if an assertion does not hold."""
        if op.type != BRANCH:
            return op.type == "Assert"
        inside = [each for inner in op.inner for each in inner.all_operations()]
        return (
            self._outputs.isdisjoint(op.outputs)
            and not any(tensor.users for tensor in op.outputs)
            and all(each.type == "Assert" for each in inside if not each.inner and has_effect(each))
        )
