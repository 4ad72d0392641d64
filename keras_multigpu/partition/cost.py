"""`StepCost`: what the replicas of a split step exchange, and how much arithmetic they share.

Bytes and arithmetic are sizes: numbers, or polynomials of the batch size if it is open.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.partition.axes import AXES, PRODUCTS, New, sizes_of
from keras_multigpu.partition.facts import Facts
from keras_multigpu.partition.families import table
from keras_multigpu.partition.program import Operation, Tensor
from keras_multigpu.partition.sizes import AnySize, product, value_of

# What a GPU computes while a byte travels: 16 TFLOPS behind PCIe's 16 GB/s. Bytes are cheaper with
# NVLink, and more expensive between hosts.
FLOPS_PER_BYTE = 1000
# Fewer bytes travel in the tenth of a millisecond that an exchange takes to start.
LEAST_BYTES = 1_000_000


class Moved(NamedTuple):
    """A value that all replicas receive.

    Attributes:
        kind: "summed" or "gathered".
        bytes: Its size, for all the times that it is moved in a step; None if that is not known.
        op: The operation that needs it; None for a result of the step.
    """

    kind: str
    bytes: AnySize | None
    op: Operation | None


class Work(NamedTuple):
    """A product or a convolution.

    Attributes:
        flops: Its arithmetic for the whole batch in a step; None if that is not known.
        op: The operation.
        shared: Whether each replica does only its part.
        after_gather: Whether it is not shared because its inputs were gathered.
    """

    flops: AnySize | None
    op: Operation
    shared: bool
    after_gather: bool


class StepCost:
    """The costs that were noted while a step was split.

    Attributes:
        moved: The values that replicas exchange.
        work: The products and convolutions.
        once: The operations that only the first replica runs, for all.
    """

    def __init__(self) -> None:
        self.moved: list[Moved] = []
        self.work: list[Work] = []
        self.once: list[Operation] = []

    def bytes(
        self, kind: str, numbers: Mapping[str, int], moved: Sequence[Moved] | None = None
    ) -> int:
        """How many bytes are summed, or gathered, for these values of named sizes."""
        found = self.moved if moved is None else moved
        return sum(number_of(each.bytes, numbers) for each in found if each.kind == kind)

    def flops(self, numbers: Mapping[str, int], work: Iterable[Work] | None = None) -> int:
        """The arithmetic of all products and convolutions, or of some."""
        found = self.work if work is None else work
        return sum(number_of(each.flops, numbers) for each in found)

    def shared(self, numbers: Mapping[str, int]) -> float | None:
        """The fraction of the arithmetic that replicas share; None if there is none."""
        everything = self.flops(numbers)
        shared = self.flops(numbers, [work for work in self.work if work.shared])
        return shared / everything if everything else None

    def part_of_gathers(self, numbers: Mapping[str, int], replicas: int) -> float:
        """The fraction of a replica's step that is due to gathers.

        This includes the arithmetic that each replica then does for the whole batch. Gathers that
        take no longer than an exchange takes to start do not count.
        """
        gathered, summed = (self.bytes(kind, numbers) for kind in ("gathered", "summed"))
        after = self.flops(numbers, [work for work in self.work if work.after_gather])
        for_gathers = FLOPS_PER_BYTE * gathered + after
        if for_gathers < FLOPS_PER_BYTE * LEAST_BYTES:
            return 0.0
        shared = self.flops(numbers, [work for work in self.work if work.shared])
        own = self.flops(numbers) - shared + shared // replicas
        return for_gathers / (FLOPS_PER_BYTE * (gathered + summed) + own)


def number_of(size: AnySize | None, numbers: Mapping[str, int]) -> int:
    """A size as a number; 0 if it is not known."""
    try:
        return 0 if size is None else value_of(size, numbers)
    except KeyError:
        return 0


def bytes_of(tensor: Tensor, facts: Facts) -> AnySize | None:
    """The size of a tensor of the global graph."""
    dims = facts.dims(tensor)
    if dims is None or None in dims:
        return None
    return product(dims) * tensor.dtype.size  # type: ignore[arg-type]


# Convolutions and their gradients: which of the inputs and outputs, without shapes, are the kernel
# and the images that the convolution makes.
CONVOLUTIONS: dict[str, tuple[int, int]] = table(
    {
        "Conv2D Conv3D DepthwiseConv2dNative": (-2, -1),
        "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput": (-3, -2),
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter": (-1, -2),
    }
)
# These multiply and add. Nothing else makes a step slow.
HEAVY = {*PRODUCTS, *CONVOLUTIONS}


def flops_of(op: Operation, facts: Facts) -> AnySize | None:
    """The arithmetic of a product or a convolution; None if the lengths of axes are not known."""
    if op.type in PRODUCTS:
        axes = AXES[op.type](op, facts)
        if axes is None:
            return None
        new = [each.length for each in axes.out if isinstance(each, New)]
        lengths: list[Any] = [*sizes_of(op, facts, axes).values(), *new]
        return None if None in lengths else 2 * product(lengths)
    factors: list[Any] = [
        facts.dims(tensor) for tensor in (*op.inputs, *op.outputs) if not is_shape(tensor)
    ]
    if any(dims is None or None in dims for dims in factors):
        return None
    kernel, made = (factors[place] for place in CONVOLUTIONS[op.type])
    each = kernel[:-2] if op.type.startswith("Depthwise") else kernel[:-1]
    return 2 * product(made) * product(each)


def is_shape(tensor: Tensor) -> bool:
    return tensor.dtype in (tf.int32, tf.int64) and tensor.shape.rank in (0, 1)
