"""What a split step costs: what its replicas exchange, and how much of the arithmetic they share.

Bytes and arithmetic are sizes: numbers, or polynomials of the batch's size where that is open.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.partition.families import table
from keras_multigpu.partition.lengths import einsum_sizes
from keras_multigpu.partition.plan import Facts
from keras_multigpu.partition.sizes import AnySize, product, value_of

# Bytes and arithmetic become one measure by what a GPU computes while a byte travels: 16 TFLOPS
# behind PCIe's 16 GB/s. With NVLink bytes are cheaper, between hosts they are dearer.
FLOPS_PER_BYTE = 1000
# Less travels in the tenth of a millisecond that an exchange takes to start.
LEAST = 1_000_000


class Moved(NamedTuple):
    """A value that all replicas get together.

    Attributes:
        kind: "summed" or "gathered".
        bytes: How large it is; None if that is not known.
        op: The operation that asked for it; None where it is a result of the step.
        times: How often that happens in a step.
    """

    kind: str
    bytes: AnySize | None
    op: tf.Operation | None
    times: AnySize = 1


class Work(NamedTuple):
    """A product or a convolution.

    Attributes:
        flops: Its arithmetic, for the whole batch; None if that is not known.
        op: The operation.
        shared: Whether each replica does its part of it, and not all of it.
        after_gather: Whether it is not shared because its inputs were gathered.
        times: How often it happens in a step.
    """

    flops: AnySize | None
    op: tf.Operation
    shared: bool
    after_gather: bool
    times: AnySize = 1


class Account:
    """What was noted of a step while it was split."""

    def __init__(self) -> None:
        self.moved: list[Moved] = []
        self.work: list[Work] = []
        self.once: list[tf.Operation] = []
        """Operations that the first replica alone runs, for all."""

    def bytes(
        self, kind: str, numbers: Mapping[str, int], moved: Sequence[Moved] | None = None
    ) -> int:
        """How many bytes are summed, or gathered, where sizes are these; what is known of it."""
        found = self.moved if moved is None else moved
        return sum(known(each.bytes, each.times, numbers) for each in found if each.kind == kind)

    def flops(self, numbers: Mapping[str, int], work: Iterable[Work] | None = None) -> int:
        """The arithmetic of products and convolutions: of all, or of some."""
        found = self.work if work is None else work
        return sum(known(each.flops, each.times, numbers) for each in found)

    def shared(self, numbers: Mapping[str, int]) -> float | None:
        """Which part of the arithmetic replicas share; None without products and convolutions."""
        everything = self.flops(numbers)
        shared = self.flops(numbers, [work for work in self.work if work.shared])
        return shared / everything if everything else None

    def part_of_gathers(self, numbers: Mapping[str, int], replicas: int) -> float:
        """Which part of a replica's step is due to what it gathers.

        That is the bytes, and the arithmetic that it then does for the whole batch. Nothing,
        where that takes no longer than to start an exchange does.
        """
        gathered, summed = (self.bytes(kind, numbers) for kind in ("gathered", "summed"))
        after = [work for work in self.work if work.after_gather]
        own = [work for work in self.work if work.shared]
        everything = self.flops(numbers)
        for_gathers = FLOPS_PER_BYTE * gathered + self.flops(numbers, after)
        if for_gathers < FLOPS_PER_BYTE * LEAST:
            return 0.0
        shared = self.flops(numbers, own)
        step = FLOPS_PER_BYTE * (gathered + summed) + everything - shared + shared // replicas
        return for_gathers / step


def known(size: AnySize | None, times: AnySize, numbers: Mapping[str, int]) -> int:
    if size is None:
        return 0
    try:
        return value_of(size * times, numbers)
    except KeyError:
        return 0


def bytes_of(tensor: tf.Tensor, facts: Facts) -> AnySize | None:
    """How large a tensor of the global graph is."""
    dims = facts.dims(tensor)
    if dims is None or None in dims:
        return None
    return product(dims) * tensor.dtype.size  # type: ignore[arg-type]


# What multiplies and adds: a step is hardly ever slow by anything else. Of convolutions the places
# of the kernel and of the images that are made, or of their gradient, among the factors.
CONVOLUTIONS: dict[str, tuple[int, int]] = table(
    {
        "Conv2D Conv3D DepthwiseConv2dNative": (-2, -1),
        "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput": (-3, -2),
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter": (-1, -2),
    }
)
HEAVY = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", *CONVOLUTIONS}


def flops_of(op: tf.Operation, facts: Facts) -> AnySize | None:
    """The arithmetic of a product or a convolution; None if the lengths of axes are not known."""
    factors: list[Any] = [
        facts.dims(tensor) for tensor in (*op.inputs, *op.outputs) if is_factor(tensor)
    ]
    if any(dims is None or None in dims for dims in factors):
        return None
    if op.type in CONVOLUTIONS:
        kernel, made = (factors[place] for place in CONVOLUTIONS[op.type])
        each = kernel[:-2] if op.type.startswith("Depthwise") else kernel[:-1]
        return 2 * product(made) * product(each)
    if op.type == "Einsum":
        sizes, dotted = einsum_sizes(op, factors[:-1])
        return 2 * product([*sizes.values(), *dotted])
    turned = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    return 2 * product(factors[-1]) * factors[0][-2 if turned else -1]


def is_factor(tensor: tf.Tensor) -> bool:
    """Whether a tensor is more than part of a shape."""
    return tensor.dtype not in (tf.int32, tf.int64) or tensor.shape.rank not in (0, 1)
