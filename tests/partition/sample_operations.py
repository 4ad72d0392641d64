"""One or several samples of each operation that has a rule."""

import functools
import inspect

import numpy as np
import tensorflow as tf
from validator import Operand, Sample

from keras_multigpu.partition.rules import elementwise
from keras_multigpu.partition.sizes import Size

raw = tf.raw_ops
B, C, T = Size.of("batch"), Size.of("other"), Size.of("time")
SAMPLES: dict[str, list[Sample]] = {}


def add(kinds, function, *operands, modes=("open", "static", "unknown"), **more):
    """Add a sample of each of these types of operations; `function` may take the raw operation."""
    for kind in kinds.split():
        own = function
        if next(iter(inspect.signature(function).parameters)) == "op":
            own = functools.partial(function, getattr(raw, kind))
        SAMPLES.setdefault(kind, []).append(Sample(own, operands, modes, **more))


def positional(op):
    """The names of an operation's inputs, which raw operations want."""
    return list(inspect.signature(op).parameters)


def call(op, *values, **more):
    return op(**dict(zip(positional(op), values, strict=False)), **more)


# ---------------------------------------------------------------- operands


def floats(*dims, dtype=tf.float64, special=True):
    return Operand(dims, dtype, lambda random, shape: random.normal(size=shape) * 2, special)


def between(low, high, *dims, dtype=tf.float64):
    """Numbers of an interval, of which neither parts nor a row may be outside."""
    return Operand(dims, dtype, lambda random, shape: random.uniform(low, high, shape))


def ints(high, *dims, dtype=tf.int32, low=0):
    return Operand(dims, dtype, lambda random, shape: random.integers(low, high, shape))


def bools(*dims):
    return Operand(dims, tf.bool, lambda random, shape: random.random(shape) > 0.5)


def complexes(*dims):
    return Operand(
        dims,
        tf.complex128,
        lambda random, shape: random.normal(size=shape) + 1j * random.normal(size=shape),
    )


def texts(*dims, words=("1.5", "-2", "30", "7")):
    return Operand(
        dims,
        tf.string,
        lambda random, shape: np.array(words, object)[random.integers(0, len(words), shape)],
    )


def lists(*dims):
    return Operand(dims, tf.float64, lambda random, shape: random.normal(size=shape), False, True)


def positive_definite(*dims):
    def values(random, shape):
        root = random.normal(size=shape)
        return root @ np.swapaxes(root, -1, -2) + 3 * np.eye(shape[-1])

    return Operand(dims, tf.float64, values)


OPEN = ("open",)
NUMBERS = np.random.default_rng(0)


def weights(*shape, dtype=tf.float64):
    return tf.constant(NUMBERS.normal(size=shape), dtype)


# ---------------------------------------------------------------- elementwise

IN_UNIT = "Acos Asin Atanh Erfinv Ndtri Log Sqrt Rsqrt Lgamma Digamma"
OF_INTS = "Invert PopulationCount"
OF_COMPLEX = "Real Imag Conj Angle ComplexAbs"
OF_TEXT = (
    "StringLower StringUpper StringStrip StringLength StringToNumber EncodeBase64 UnicodeScript"
)
OWN = (
    "Cast Acosh FakeQuantWithMinMaxArgs LogicalNot Bucketize AsString StringToHashBucket "
    "StringToHashBucketFast StringToHashBucketStrong StaticRegexReplace StaticRegexFullMatch "
    "DecodeBase64 UnicodeTranscode CheckNumerics CheckNumericsV2 UnicodeScript "
    f"{IN_UNIT} {OF_INTS} {OF_COMPLEX} {OF_TEXT}"
).split()
ANY_FLOAT = " ".join(kind for kind in elementwise.UNARY if kind not in OWN)

add(ANY_FLOAT, lambda op, x: call(op, x), floats(B, 2), modes=OPEN)
add("Identity Neg Abs", lambda op, x: call(op, x), ints(9, T, B, low=-9))
add(IN_UNIT, lambda op, x: call(op, x), between(0.1, 0.9, B, 2), modes=OPEN)
add("Acosh", lambda op, x: call(op, x), between(1, 3, B, 2), modes=OPEN)
add(OF_INTS, lambda op, x: call(op, x), ints(9, B, 2), modes=OPEN)
add(
    "Real Imag Angle ComplexAbs",
    lambda op, x: call(op, x, Tout=tf.float64),
    complexes(B, 2),
    modes=OPEN,
)
add("Conj", lambda op, x: call(op, x), complexes(B, 2), modes=OPEN)
add(
    "StringLower StringUpper StringStrip StringLength EncodeBase64",
    lambda op, x: call(op, x),
    texts(B, 2),
    modes=OPEN,
)
add("StringToNumber", lambda op, x: call(op, x), texts(B, 2), modes=OPEN)
add("UnicodeScript", lambda op, x: call(op, x), ints(99, B, low=65), modes=OPEN)
add("DecodeBase64", lambda op, x: call(op, x), texts(B, words=("QUJD", "ZGVm")), modes=OPEN)
add(
    "UnicodeTranscode",
    lambda op, x: op(input=x, input_encoding="UTF-8", output_encoding="UTF-16-BE"),
    texts(B),
    modes=OPEN,
)
add(
    "StringToHashBucket StringToHashBucketFast",
    lambda op, x: call(op, x, num_buckets=7),
    texts(B, 2),
    modes=OPEN,
)
add(
    "StringToHashBucketStrong",
    lambda op, x: call(op, x, num_buckets=7, key=[1, 2]),
    texts(B, 2),
    modes=OPEN,
)
add(
    "StaticRegexReplace",
    lambda op, x: op(input=x, pattern="1", rewrite="one"),
    texts(B, 2),
    modes=OPEN,
)
add("StaticRegexFullMatch", lambda op, x: op(input=x, pattern="1.*"), texts(B, 2), modes=OPEN)
add("AsString", lambda op, x: op(input=x), ints(9, B, 2), modes=OPEN)
add("LogicalNot", lambda op, x: op(x=x), bools(B, 2), modes=OPEN)
add("Bucketize", lambda op, x: op(input=x, boundaries=[0.0, 1.0]), floats(B, 2), modes=OPEN)
add(
    "CheckNumerics CheckNumericsV2",
    lambda op, x: op(tensor=x, message=""),
    floats(B, 2, special=False),
    modes=OPEN,
)
for before, after in ((tf.float32, tf.float64), (tf.float64, tf.float32), (tf.float32, tf.float16)):
    add(
        "Cast",
        lambda op, x, to=after: op(x=x, DstT=to),
        floats(B, 2, dtype=before),
        modes=OPEN,
        tolerance=1e-5,
    )
add("Cast", lambda op, x: op(x=x, DstT=tf.int32), floats(B, 2, special=False), modes=OPEN)
add("Cast", lambda op, x: op(x=x, DstT=tf.float64), ints(99, B, 2, low=-99), modes=OPEN)
add("Cast", lambda op, x: op(x=x, DstT=tf.bool), ints(3, B, 2, low=-2), modes=OPEN)
add("Cast", lambda op, x: op(x=x, DstT=tf.float64), bools(B, 2), modes=OPEN)

COMPARED = "Greater GreaterEqual Less LessEqual Equal NotEqual ApproximateEqual"
PLAIN = (
    "Add AddV2 Sub Mul MulNoNan RealDiv Div DivNoNan Maximum Minimum SquaredDifference Xdivy "
    "NextAfter Atan2 FloorDiv FloorMod"
)
POSITIVE = "Pow Xlogy Xlog1py Igamma Igammac"
WHOLE = "FloorDiv FloorMod Mod TruncateDiv TruncateMod"
add(
    f"{PLAIN} {COMPARED}",
    lambda op, x, y: call(op, x, y),
    floats(B, 3),
    floats(B, 3, special=False),
    modes=OPEN,
)
for shapes in (
    ((B, 3), (3,)),
    ((B, 1), (1, 3)),
    ((1, 3), (B, 3)),
    ((3,), (B, 3)),
    ((B,), ()),
    ((T, B, 1), (B, 3)),
    ((1, B), (B, 1)),
    ((2 * B, 2), (2 * B, 1)),
):
    one, two = shapes
    add(
        "AddV2 Mul RealDiv DivNoNan",
        lambda op, x, y: call(op, x, y),
        floats(*one),
        floats(*two, special=False),
    )
add(
    "Sub AddV2 Mul",
    lambda op, x, y: call(op, x, y),
    ints(9, B, 2, low=-9),
    ints(9, B, 2, low=-9),
    modes=OPEN,
)
add(
    POSITIVE,
    lambda op, x, y: call(op, x, y),
    between(0.1, 2, B, 3),
    between(0.1, 2, B, 3),
    modes=OPEN,
)
add("Zeta", lambda op, x, y: call(op, x, y), between(1.5, 3, B), between(1, 2, B), modes=OPEN)
add(
    "Polygamma",
    lambda op, x, y: call(op, tf.round(x), y),
    between(1, 3, B),
    between(1, 2, B),
    modes=OPEN,
)
add(
    "Polygamma",
    lambda op, y: call(op, tf.constant(2.0, tf.float64), y),
    between(1, 2, B),
    modes=OPEN,
)
add(
    f"{WHOLE} Div BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift",
    lambda op, x, y: call(op, x, y),
    ints(99, B, 2),
    ints(5, B, 2, low=1),
    modes=OPEN,
)
add("LogicalAnd LogicalOr", lambda op, x, y: call(op, x, y), bools(B, 3), bools(3), modes=OPEN)
add(
    "Complex",
    lambda op, x, y: op(real=x, imag=y, Tout=tf.complex128),
    floats(B, 2, special=False),
    floats(B, 2, special=False),
    modes=OPEN,
)
add(
    "Betainc",
    lambda op, a, b, x: op(a=a, b=b, x=x),
    between(1, 2, B),
    between(1, 2, B),
    between(0.1, 0.9, B),
    modes=OPEN,
)
add("SelectV2", lambda op, c, x, y: op(condition=c, t=x, e=y), bools(B, 1), floats(B, 3), floats(3))
add(
    "SelectV2",
    lambda op, c, x, y: op(condition=c, t=x, e=y),
    bools(3),
    floats(B, 3),
    floats(B, 3),
    modes=OPEN,
)
add("Select", lambda op, c, x, y: op(condition=c, x=x, y=y), bools(B), floats(B, 3), floats(B, 3))
add(
    "Select",
    lambda op, c, x, y: op(condition=c, x=x, y=y),
    bools(T, B),
    floats(T, B),
    floats(T, B),
    modes=OPEN,
)
add(
    "Select",
    lambda op, c, x, y: op(condition=c, x=x, y=y),
    bools(),
    floats(B, 2),
    floats(B, 2),
    modes=OPEN,
)
add(
    "ClipByValue",
    lambda op, x: op(
        t=x,
        clip_value_min=tf.constant(-1.0, tf.float64),
        clip_value_max=tf.constant(1.0, tf.float64),
    ),
    floats(B, 3),
    modes=OPEN,
)
add(
    "ClipByValue",
    lambda op, x, y: op(t=x, clip_value_min=y, clip_value_max=y + 1),
    floats(B, 3),
    floats(B, 3),
    modes=OPEN,
)
add(
    "Substr",
    lambda op, x, n: op(input=x, pos=n, len=n),
    texts(B, words=("abc", "defg")),
    ints(2, B),
    modes=OPEN,
)
add("StringJoin", lambda op, x, y: op(inputs=[x, y]), texts(B, 2), texts(B, 2), modes=OPEN)
add("StringJoin", lambda op, x: op(inputs=[x, tf.constant("!")]), texts(B, 2), modes=OPEN)
add(
    "RegexReplace",
    lambda op, x: op(input=x, pattern=tf.constant("1"), rewrite=tf.constant("2")),
    texts(B, 2),
    modes=OPEN,
)
add(
    "RegexFullMatch", lambda op, x: op(input=x, pattern=tf.constant("1.*")), texts(B, 2), modes=OPEN
)

GRADIENTS = [
    kind
    for kind in elementwise.SAME_SHAPES
    if kind not in ("AddN", "FakeQuantWithMinMaxArgsGradient")
]
add(
    " ".join(GRADIENTS),
    lambda op, x, y: call(op, x, y),
    between(0.5, 2, B, 2),
    between(0.5, 2, B, 2),
    modes=OPEN,
)
add(
    "ReluGrad RsqrtGrad",
    lambda op, x, y: call(op, x, y),
    between(0.5, 2, T, 2),
    between(0.5, 2, T, 2),
    modes=OPEN,
)
add(
    "FakeQuantWithMinMaxArgsGradient",
    lambda op, x, y: call(op, x, y),
    floats(B, 2, dtype=tf.float32),
    floats(B, 2, dtype=tf.float32, special=False),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "FakeQuantWithMinMaxArgs",
    lambda op, x: op(inputs=x),
    floats(B, 2, dtype=tf.float32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "AddN",
    lambda op, x, y, z: op(inputs=[x, y, z]),
    floats(B, 2),
    floats(B, 2, special=False),
    floats(B, 2, special=False),
    modes=OPEN,
)
add("IdentityN", lambda op, x, y: op(input=[x, y]), floats(B, 2), floats(3, B), modes=OPEN)
add("Bitcast", lambda op, x: op(input=x, type=tf.int64), floats(B, 2))
add("Bitcast", lambda op, x: op(input=x, type=tf.int32), floats(B), modes=OPEN)
add("Bitcast", lambda op, x: op(input=x, type=tf.int64), ints(9, B, 2), modes=OPEN)
add("BiasAdd", lambda op, x, y: op(value=x, bias=y), floats(B, 3), floats(3))
add("BiasAdd", lambda op, x, y: op(value=x, bias=y, data_format="NCHW"), floats(B, 3, T), floats(3))
add("BiasAdd", lambda op, x, y: op(value=x, bias=y), floats(2, B), floats(B), modes=OPEN)
add(
    "FakeQuantWithMinMaxVars",
    lambda op, x: op(inputs=x, min=-1.0, max=1.0),
    floats(B, 2, dtype=tf.float32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "FakeQuantWithMinMaxVars",
    lambda op, x, y: op(inputs=x, min=y, max=1.0),
    floats(B, 2, dtype=tf.float32),
    between(-3, -1, dtype=tf.float32),
    modes=OPEN,
    tolerance=1e-5,
)
TABLE = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer([0, 1, 2], [5, 6, 7], tf.int64, tf.int64), -1
)
add(
    "LookupTableFindV2",
    lambda op, x: op(
        table_handle=TABLE.resource_handle, keys=x, default_value=tf.constant(-1, tf.int64)
    ),
    ints(4, B, 2, dtype=tf.int64),
    modes=OPEN,
)

# ---------------------------------------------------------------- reductions

REDUCED = "Sum Mean Max Min Prod EuclideanNorm"
for axes in (0, [0], [1], [0, 1], [-1], [], [1, 2], [0, 2]):
    add(
        "Sum Mean Max",
        lambda op, x, a=axes: op(input=x, axis=tf.constant(a, tf.int32)),
        floats(B, T, 2),
    )
for axes in ([0], [1], [0, 2]):
    add(
        "Sum Mean Max",
        lambda op, x, a=axes: op(input=x, axis=a, keep_dims=True),
        floats(B, T, 2),
        modes=OPEN,
    )
add(REDUCED, lambda op, x: op(input=x, axis=[0]), floats(B, 3), modes=OPEN)
add(REDUCED, lambda op, x: op(input=x, axis=[0]), floats(3, B), modes=OPEN)
add("Sum Max Min Prod", lambda op, x: op(input=x, axis=[0]), ints(9, B, 3, low=-9), modes=OPEN)
add("Mean", lambda op, x: op(input=x, axis=[0]), ints(9, B, 3, low=-9), modes=OPEN)
add(
    "Mean Sum",
    lambda op, x: op(input=x, axis=[0, 1]),
    floats(T, B, dtype=tf.float16, special=False),
    tolerance=3e-2,
)
add("Mean", lambda op, x: op(input=x, axis=[0, 1]), floats(2 * B, 2))
add("All Any", lambda op, x: op(input=x, axis=[0]), bools(B, 3), modes=OPEN)
add("All Any", lambda op, x: op(input=x, axis=[1]), bools(B, 3), modes=OPEN)
# The sum of a gradient for what was broadcast: the axes are known only when the step runs.
add(
    "Sum",
    lambda op, x: op(
        input=x, axis=raw.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.constant([1, 3]))[1]
    ),
    floats(B, 3),
    one_row=False,
)
add("BiasAddGrad", lambda op, x: op(out_backprop=x), floats(B, 3))
add("BiasAddGrad", lambda op, x: op(out_backprop=x, data_format="NCHW"), floats(B, 3, T))
add("BiasAddGrad", lambda op, x: op(out_backprop=x), floats(3, B), modes=OPEN)
add("L2Loss", lambda op, x: op(t=x), floats(T, B))
for axis in (0, 1, -1):
    add(
        "ArgMax ArgMin",
        lambda op, x, a=axis: op(input=x, dimension=a),
        floats(B, T, 3, special=False),
    )
    add(
        "Cumsum Cumprod CumulativeLogsumexp",
        lambda op, x, a=axis: op(x=x, axis=a),
        floats(B, T, 2, special=False),
    )
    add("ReverseV2", lambda op, x, a=axis: op(tensor=x, axis=[a]), floats(B, T, 2))
    add("Roll", lambda op, x, a=axis: op(input=x, shift=[1], axis=[a]), floats(B, T, 2))
add("Cumsum", lambda op, x: op(x=x, axis=1, exclusive=True, reverse=True), floats(B, 3), modes=OPEN)
add("Softmax LogSoftmax", lambda op, x: op(logits=x), floats(B, 3))
add("Softmax LogSoftmax", lambda op, x: op(logits=x), floats(T, B))
add("TopKV2", lambda op, x: op(input=x, k=1), floats(B, 3, special=False))
add("TopKV2", lambda op, x: op(input=x, k=1), floats(2, B, special=False), modes=OPEN)
add("NthElement", lambda op, x: op(input=x, n=1), floats(B, 3, special=False), modes=OPEN)
add(
    "InTopK",
    lambda op, x, y: op(predictions=x, targets=y, k=1),
    floats(B, 3, dtype=tf.float32),
    ints(3, B),
    modes=OPEN,
)
add(
    "InTopKV2",
    lambda op, x, y: op(predictions=x, targets=y, k=2),
    floats(B, 3, dtype=tf.float32),
    ints(3, B),
)
add("Cross", lambda op, x, y: op(a=x, b=y), floats(B, 3), floats(B, 3, special=False), modes=OPEN)
add(
    "LowerBound UpperBound",
    lambda op, x, y: op(sorted_inputs=tf.sort(x), values=y),
    between(0, 1, B, 3),
    between(0, 1, B, 2),
    modes=OPEN,
)
add(
    "LowerBound UpperBound",
    lambda op, y: op(sorted_inputs=tf.constant([[0.0, 0.5]], tf.float64), values=y),
    between(0, 1, 1, B),
    modes=OPEN,
)


def sorted_rows(*dims):
    return Operand(dims, tf.float64, lambda random, shape: np.sort(random.random(shape)))


add(
    "LowerBound UpperBound",
    lambda op, x, y: op(sorted_inputs=x, values=y),
    sorted_rows(B, 3),
    between(0, 1, B, 2),
    modes=OPEN,
)
add("FFT IFFT FFT2D IFFT2D", lambda op, x: op(input=x), complexes(B, 2, 2), modes=OPEN)
add("FFT3D IFFT3D", lambda op, x: op(input=x), complexes(B, 2, 2, 2), modes=OPEN)
add(
    "RFFT",
    lambda op, x: op(input=x, fft_length=[4], Tcomplex=tf.complex128),
    floats(B, 4, special=False),
    modes=OPEN,
)
add(
    "IRFFT",
    lambda op, x: op(input=x, fft_length=[4], Treal=tf.float64),
    complexes(B, 3),
    modes=OPEN,
)
add(
    "RFFT2D",
    lambda op, x: op(input=x, fft_length=[2, 4], Tcomplex=tf.complex128),
    floats(B, 2, 4, special=False),
    modes=OPEN,
)
add(
    "IRFFT2D",
    lambda op, x: op(input=x, fft_length=[2, 4], Treal=tf.float64),
    complexes(B, 2, 3),
    modes=OPEN,
)
add(
    "RFFT3D",
    lambda op, x: op(input=x, fft_length=[2, 2, 4], Tcomplex=tf.complex128),
    floats(B, 2, 2, 4, special=False),
    modes=OPEN,
)
add(
    "IRFFT3D",
    lambda op, x: op(input=x, fft_length=[2, 2, 4], Treal=tf.float64),
    complexes(B, 2, 2, 3),
    modes=OPEN,
)
add("RGBToHSV HSVToRGB", lambda op, x: op(images=x), between(0, 1, B, 2, 2, 3), modes=OPEN)
add(
    "AdjustHue",
    lambda op, x: op(images=x, delta=0.1),
    between(0, 1, B, 2, 2, 3, dtype=tf.float32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "AdjustSaturation",
    lambda op, x: op(images=x, scale=0.5),
    between(0, 1, B, 2, 2, 3, dtype=tf.float32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "AdjustContrastv2",
    lambda op, x: op(images=x, contrast_factor=0.5),
    between(0, 1, B, 2, 2, 3, dtype=tf.float32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "AdjustContrastv2",
    lambda op, x: op(images=x, contrast_factor=0.5),
    between(0, 1, B, 2, 3, dtype=tf.float32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "FakeQuantWithMinMaxVarsPerChannel",
    lambda op, x: op(inputs=x, min=[-1.0, -2.0], max=[1.0, 2.0]),
    floats(B, 2, dtype=tf.float32),
    modes=OPEN,
    tolerance=1e-5,
)
add("MatrixBandPart", lambda op, x: op(input=x, num_lower=1, num_upper=0), floats(B, 3, 3))
add("MatrixBandPart", lambda op, x: op(input=x, num_lower=1, num_upper=0), floats(B, B), modes=OPEN)
add(
    "MatrixDiagPartV3",
    lambda op, x: op(input=x, k=0, padding_value=tf.constant(0.0, tf.float64)),
    floats(B, 3, 3),
    modes=OPEN,
)
add(
    "MatrixDiagPartV3",
    lambda op, x: op(input=x, k=[-1, 1], padding_value=tf.constant(0.0, tf.float64)),
    floats(B, 3, 3),
    modes=OPEN,
)
add(
    "MatrixDiagPartV3",
    lambda op, x: op(input=x, k=0, padding_value=tf.constant(0.0, tf.float64)),
    floats(B, B),
    modes=OPEN,
)
add(
    "MatrixDiagV3",
    lambda op, x: op(
        diagonal=x, k=0, num_rows=-1, num_cols=-1, padding_value=tf.constant(0.0, tf.float64)
    ),
    floats(B, 3),
    modes=OPEN,
)
add(
    "MatrixDiagV3",
    lambda op, x: op(
        diagonal=x, k=0, num_rows=-1, num_cols=-1, padding_value=tf.constant(0.0, tf.float64)
    ),
    floats(B),
    modes=OPEN,
)
add(
    "MatrixDiagV3",
    lambda op, x: op(
        diagonal=x, k=[-1, 0], num_rows=3, num_cols=3, padding_value=tf.constant(0.0, tf.float64)
    ),
    floats(B, 2, 3),
    modes=OPEN,
)
add(
    "MatrixSetDiagV3",
    lambda op, x, d: op(input=x, diagonal=d, k=0),
    floats(B, 3, 3),
    floats(B, 3),
    modes=OPEN,
)
add(
    "MatrixSetDiagV3",
    lambda op, x, d: op(input=x, diagonal=d, k=0),
    floats(B, B),
    floats(B),
    modes=OPEN,
)
MATRIX = positive_definite(B, 2, 2)
add(
    "Cholesky MatrixInverse MatrixDeterminant LogMatrixDeterminant",
    lambda op, x: op(input=x),
    MATRIX,
    modes=OPEN,
)
add("Cholesky MatrixInverse", lambda op, x: op(input=x), positive_definite(B, B), modes=OPEN)
add("MatrixSquareRoot Lu", lambda op, x: op(input=x), MATRIX, modes=OPEN)


def complex_matrix(*dims):
    return Operand(dims, tf.complex128, positive_definite(*dims).values)


add("MatrixLogarithm", lambda op, x: op(input=x), complex_matrix(B, 2, 2), modes=OPEN)
add("SelfAdjointEigV2 Svd Qr", lambda op, x: op(input=x), MATRIX, modes=OPEN)
add(
    "CholeskyGrad",
    lambda op, x, y: op(l=x, grad=y),
    MATRIX,
    floats(B, 2, 2, special=False),
    modes=OPEN,
)
add(
    "MatrixSolve MatrixTriangularSolve",
    lambda op, x, y: op(matrix=x, rhs=y),
    MATRIX,
    floats(B, 2, 1, special=False),
    modes=OPEN,
)
add(
    "MatrixTriangularSolve",
    lambda op, x, y: op(matrix=x, rhs=y),
    positive_definite(1, 2, 2),
    floats(B, 2, 1, special=False),
    modes=OPEN,
)
add(
    "ReverseSequence",
    lambda op, x, n: op(input=x, seq_lengths=n, seq_dim=1, batch_dim=0),
    floats(B, 3, 2),
    ints(3, B),
)
add(
    "ReverseSequence",
    lambda op, x, n: op(input=x, seq_lengths=n, seq_dim=0, batch_dim=1),
    floats(3, B, T),
    ints(3, B),
    modes=OPEN,
)
add(
    "ReverseSequence",
    lambda op, x: op(input=x, seq_lengths=[1, 2], seq_dim=0, batch_dim=1),
    floats(3, 2, B),
    modes=OPEN,
)

# ---------------------------------------------------------------- products

for turned in (False, True):
    for other in (False, True):
        shapes = ((T, B) if turned else (B, T)), ((3, T) if other else (T, 3))
        add(
            "MatMul",
            lambda op, x, y, a=turned, b=other: op(a=x, b=y, transpose_a=a, transpose_b=b),
            floats(*shapes[0]),
            floats(*shapes[1], special=False),
        )
add(
    "MatMul",
    lambda op, x, y: op(a=x, b=y, transpose_a=True),
    floats(2 * B, 3),
    floats(2 * B, 2, special=False),
)
add(
    "MatMul",
    lambda op, x, y: op(a=x, b=y, transpose_b=True),
    floats(B, 3),
    floats(B, 3, special=False),
)
add("MatMul", lambda op, x: op(a=x, b=weights(3, 2)), floats(T, 3, special=False), modes=OPEN)
for kind in ("BatchMatMul", "BatchMatMulV2"):
    add(kind, lambda op, x, y: op(x=x, y=y), floats(B, 2, 3), floats(B, 3, 2, special=False))
add(
    "BatchMatMulV2",
    lambda op, x, y: op(x=x, y=y, adj_y=True),
    floats(B, 1, 2, 3),
    floats(1, T, 2, 3, special=False),
)
add(
    "BatchMatMulV2",
    lambda op, x, y: op(x=x, y=y, adj_x=True),
    floats(3, B, 2),
    floats(B, 3, special=False),
    modes=OPEN,
)
add("BatchMatMulV2", lambda op, x, y: op(x=x, y=y), floats(2, B, 3), floats(3, 2, special=False))
add(
    "BatchMatMulV3",
    lambda op, x, y: op(x=x, y=y, Tout=tf.float64),
    floats(B, 2, 3),
    floats(3, 2, special=False),
    modes=OPEN,
)
for equation, one, two in (
    ("bi,ij->bj", (B, 3), (3, 2)),
    ("bi,bj->ij", (B, 3), (B, 2)),
    ("bij,bjk->bik", (B, 2, 3), (B, 3, 2)),
    ("bi,bi->", (B, 3), (B, 3)),
    ("...ij,jk->...ik", (B, 2, 3), (3, 2)),
    ("...i,...i->...", (1, B, 3), (T, B, 3)),
    ("bqhd,bkhd->bhqk", (B, T, 2, 2), (B, T, 2, 2)),
    ("bi,cj->bicj", (B, 2), (C, 2)),
):
    add(
        "Einsum",
        lambda op, x, y, e=equation: op(inputs=[x, y], equation=e),
        floats(*one),
        floats(*two, special=False),
    )
add("Einsum", lambda op, x: op(inputs=[x], equation="bi->i"), floats(B, 3), modes=OPEN)
add("Einsum", lambda op, x: op(inputs=[x], equation="bb->b"), floats(B, B), modes=OPEN)
add("Einsum", lambda op, x: op(inputs=[x], equation="bi->ib"), floats(B, 3), modes=OPEN)

# ---------------------------------------------------------------- one result for each example

F32 = tf.float32
IMAGE = floats(B, 4, 4, 2)
SAME = dict(strides=[1, 1, 1, 1], padding="SAME")
VALID = dict(strides=[1, 2, 2, 1], padding="VALID")
KERNEL, DEPTH_KERNEL, KERNEL_3D = weights(2, 2, 2, 3), weights(2, 2, 2, 1), weights(2, 2, 2, 2, 3)
NOT_KNOWN = ("open", "static")
add("Conv2D", lambda op, x: op(input=x, filter=KERNEL, **SAME), IMAGE, modes=NOT_KNOWN)
add("Conv2D", lambda op, x: op(input=x, filter=KERNEL, **VALID), floats(1, B, 4, 2), modes=OPEN)
add("Conv", lambda op, x: op(input=x, filter=KERNEL, **SAME), IMAGE, modes=OPEN)
add(
    "DepthwiseConv2dNative",
    lambda op, x: op(input=x, filter=DEPTH_KERNEL, **SAME),
    IMAGE,
    modes=OPEN,
)
add(
    "Conv3D",
    lambda op, x: op(input=x, filter=KERNEL_3D, strides=[1] * 5, padding="SAME"),
    floats(B, 2, 2, 2, 2),
    modes=OPEN,
)
add(
    "Dilation2D",
    lambda op, x: op(input=x, filter=weights(2, 2, 2), rates=[1] * 4, **SAME),
    floats(B, 4, 4, 2, special=False),
    modes=OPEN,
)
add(
    "Conv2DBackpropInput",
    lambda op, y: op(
        input_sizes=tf.stack([tf.shape(y)[0], 4, 4, 2]), filter=KERNEL, out_backprop=y, **SAME
    ),
    floats(B, 4, 4, 3),
)
add(
    "Conv2DBackpropInput",
    lambda op, y: op(input_sizes=[4, 4], filter=KERNEL, out_backprop=y, **SAME),
    floats(B, 4, 4, 3),
    modes=OPEN,
)
add(
    "Conv2DBackpropFilter",
    lambda op, x, y: op(input=x, filter_sizes=[2, 2, 2, 3], out_backprop=y, **SAME),
    IMAGE,
    floats(B, 4, 4, 3, special=False),
    modes=NOT_KNOWN,
)
add(
    "Conv3DBackpropInputV2",
    lambda op, y: op(
        input_sizes=tf.stack([tf.shape(y)[0], 2, 2, 2, 2]),
        filter=KERNEL_3D,
        out_backprop=y,
        strides=[1] * 5,
        padding="SAME",
    ),
    floats(B, 2, 2, 2, 3),
    modes=OPEN,
)
add(
    "Conv3DBackpropFilterV2",
    lambda op, x, y: op(
        input=x, filter_sizes=[2, 2, 2, 2, 3], out_backprop=y, strides=[1] * 5, padding="SAME"
    ),
    floats(B, 2, 2, 2, 2),
    floats(B, 2, 2, 2, 3, special=False),
    modes=OPEN,
)
add(
    "DepthwiseConv2dNativeBackpropInput",
    lambda op, y: op(
        input_sizes=tf.stack([tf.shape(y)[0], 4, 4, 2]), filter=DEPTH_KERNEL, out_backprop=y, **SAME
    ),
    floats(B, 4, 4, 2),
)
add(
    "DepthwiseConv2dNativeBackpropFilter",
    lambda op, x, y: op(input=x, filter_sizes=[2, 2, 2, 1], out_backprop=y, **SAME),
    IMAGE,
    floats(B, 4, 4, 2, special=False),
    modes=OPEN,
)
add(
    "Dilation2DBackpropInput Dilation2DBackpropFilter",
    lambda op, x, y: op(input=x, filter=weights(2, 2, 2), out_backprop=y, rates=[1] * 4, **SAME),
    floats(B, 4, 4, 2, special=False),
    floats(B, 4, 4, 2, special=False),
    modes=OPEN,
)
POOL = dict(ksize=[1, 2, 2, 1], **VALID)
POOL_3D = dict(ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID")
add("MaxPool", lambda op, x: op(input=x, **POOL), IMAGE, modes=NOT_KNOWN)
add("MaxPoolV2", lambda op, x: op(input=x, **POOL), IMAGE, modes=OPEN)
add("AvgPool", lambda op, x: op(value=x, **POOL), IMAGE, modes=OPEN)
add(
    "AvgPool3D MaxPool3D",
    lambda op, x: op(input=x, **POOL_3D),
    floats(B, 2, 2, 2, 2, dtype=F32),
    modes=OPEN,
    tolerance=1e-5,
)
for flag in (False, True):
    add(
        "MaxPoolWithArgmax",
        lambda op, x, f=flag: op(input=x, include_batch_in_index=f, **POOL),
        floats(B, 4, 4, 2, special=False),
        modes=OPEN,
    )
MAXED = floats(B, 2, 2, 2, special=False)
PLAIN_IMAGE = floats(B, 4, 4, 2, special=False)
add(
    "MaxPoolGrad",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL),
    PLAIN_IMAGE,
    MAXED,
    MAXED,
    modes=NOT_KNOWN,
)
add(
    "MaxPoolGradV2",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL),
    PLAIN_IMAGE,
    MAXED,
    MAXED,
    modes=OPEN,
)
add(
    "MaxPoolGradGrad MaxPoolGradGradV2",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL),
    PLAIN_IMAGE,
    MAXED,
    PLAIN_IMAGE,
    modes=OPEN,
)
CUBE, CUBE_MAXED = (
    floats(B, 2, 2, 2, 2, dtype=F32, special=False),
    floats(B, 1, 1, 1, 2, dtype=F32, special=False),
)
add(
    "MaxPool3DGrad",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL_3D),
    CUBE,
    CUBE_MAXED,
    CUBE_MAXED,
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "MaxPool3DGradGrad",
    lambda op, x, y, d: op(orig_input=x, orig_output=y, grad=d, **POOL_3D),
    CUBE,
    CUBE_MAXED,
    CUBE,
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "MaxPoolGradWithArgmax",
    lambda op, x, d, n: op(input=x, grad=d, argmax=n, include_batch_in_index=False, **POOL),
    PLAIN_IMAGE,
    MAXED,
    ints(4, B, 2, 2, 2, dtype=tf.int64),
    wishes=False,
    modes=OPEN,
)
add(
    "AvgPoolGrad",
    lambda op, y: op(orig_input_shape=tf.stack([tf.shape(y)[0], 4, 4, 2]), grad=y, **POOL),
    floats(B, 2, 2, 2),
)
add(
    "AvgPool3DGrad",
    lambda op, y: op(orig_input_shape=tf.stack([tf.shape(y)[0], 2, 2, 2, 2]), grad=y, **POOL_3D),
    floats(B, 1, 1, 1, 2, dtype=F32),
    modes=OPEN,
    tolerance=1e-5,
)
add("LRN", lambda op, x: op(input=x), floats(B, 2, 2, 2, dtype=F32), modes=OPEN, tolerance=1e-5)
LOCAL = floats(B, 2, 2, 2, dtype=F32, special=False)
add(
    "LRNGrad",
    lambda op, x, y, z: op(input_grads=x, input_image=y, output_image=z),
    LOCAL,
    LOCAL,
    LOCAL,
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "SpaceToDepth DepthToSpace",
    lambda op, x: op(input=x, block_size=2),
    floats(B, 4, 4, 4),
    modes=OPEN,
)
add(
    "ExtractImagePatches",
    lambda op, x: op(images=x, ksizes=[1, 2, 2, 1], rates=[1] * 4, **VALID),
    IMAGE,
    modes=OPEN,
)
add(
    "ExtractVolumePatches",
    lambda op, x: op(input=x, ksizes=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID"),
    floats(B, 2, 2, 2, 2),
    modes=OPEN,
)
SMALL_IMAGE = floats(B, 2, 2, 2, dtype=F32)
add(
    "ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea",
    lambda op, x: op(images=x, size=[3, 3]),
    SMALL_IMAGE,
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "ResizeNearestNeighborGrad",
    lambda op, y: op(grads=y, size=[2, 2]),
    floats(B, 3, 3, 2, dtype=F32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "ResizeBilinearGrad ResizeBicubicGrad",
    lambda op, y, x: op(grads=y, original_image=x),
    floats(B, 3, 3, 2, dtype=F32),
    SMALL_IMAGE,
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "ScaleAndTranslate",
    lambda op, x: op(images=x, size=[3, 3], scale=[1.5, 1.5], translation=[0.1, 0.1]),
    SMALL_IMAGE,
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "ScaleAndTranslateGrad",
    lambda op, y, x: op(grads=y, original_image=x, scale=[1.5, 1.5], translation=[0.1, 0.1]),
    floats(B, 3, 3, 2, dtype=F32),
    SMALL_IMAGE,
    modes=OPEN,
    tolerance=1e-5,
)
for count in (B, 1):
    add(
        "ImageProjectiveTransformV2",
        lambda op, x, t: op(images=x, transforms=t, output_shape=[2, 2], interpolation="BILINEAR"),
        SMALL_IMAGE,
        between(0.1, 0.9, count, 8, dtype=F32),
        modes=OPEN,
        tolerance=1e-5,
    )
    add(
        "ImageProjectiveTransformV3",
        lambda op, x, t: op(
            images=x, transforms=t, output_shape=[2, 2], interpolation="BILINEAR", fill_value=0.0
        ),
        SMALL_IMAGE,
        between(0.1, 0.9, count, 8, dtype=F32),
        tolerance=1e-5,
    )
add(
    "CropAndResize",
    lambda op, x, b: op(image=x, boxes=b, box_ind=tf.range(tf.shape(b)[0]) * 0, crop_size=[2, 2]),
    floats(2, 4, 4, 1, dtype=F32, special=False),
    between(0, 1, B, 4, dtype=F32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "CropAndResize",
    lambda op, x, b, n: op(image=x, boxes=b, box_ind=n, crop_size=[2, 2]),
    floats(B, 4, 4, 1, dtype=F32, special=False),
    between(0, 1, B, 4, dtype=F32),
    ints(1, B),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "DrawBoundingBoxes",
    lambda op, x, b: op(images=x, boxes=b),
    between(0, 1, B, 4, 4, 3, dtype=F32),
    between(0, 1, B, 1, 4, dtype=F32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "DrawBoundingBoxesV2",
    lambda op, x, b: op(images=x, boxes=b, colors=[[1.0, 0.0, 0.0]]),
    between(0, 1, B, 4, 4, 3, dtype=F32),
    between(0, 1, B, 1, 4, dtype=F32),
    modes=OPEN,
    tolerance=1e-5,
)
add(
    "SparseSoftmaxCrossEntropyWithLogits",
    lambda op, x, y: op(features=x, labels=y),
    floats(B, 3),
    ints(3, B),
)
add(
    "SoftmaxCrossEntropyWithLogits",
    lambda op, x, y: op(features=x, labels=y),
    floats(B, 3),
    floats(B, 3, special=False),
)
add(
    "SoftmaxCrossEntropyWithLogits",
    lambda op, x, y: op(features=x, labels=y),
    floats(B, 3),
    floats(1, 3, special=False),
    modes=("static",),
)
QUANTIZED = floats(B, 2, dtype=F32, special=False)
add(
    "FakeQuantWithMinMaxVarsGradient",
    lambda op, y, x: op(gradients=y, inputs=x, min=-1.0, max=1.0),
    QUANTIZED,
    QUANTIZED,
    modes=OPEN,
    tolerance=1e-4,
)
add(
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    lambda op, y, x: op(gradients=y, inputs=x, min=[-1.0, -2.0], max=[1.0, 2.0]),
    QUANTIZED,
    QUANTIZED,
    modes=OPEN,
    tolerance=1e-4,
)

# ---------------------------------------------------------------- shapes

for before, after in (
    ((B, 6), lambda n, t: [n, 2, 3]),
    ((B, 6), lambda n, t: [-1, 3]),
    ((B, T, 2), lambda n, t: [n * t, 2]),
    ((B, T, 2), lambda n, t: [n, -1]),
    ((B * T, 2), lambda n, t: [-1, t, 2]),
    ((B, 4), lambda n, t: [-1]),
    ((4 * B,), lambda n, t: [-1, 4]),
    ((4 * B,), lambda n, t: [4, -1]),
    ((2 * B, 3), lambda n, t: [2, -1, 3]),
    ((2, B, 3), lambda n, t: [-1, 3]),
    ((T, B, 3), lambda n, t: [-1, 3]),
    ((B, 4), lambda n, t: [4, n]),
    ((B, 1, 3), lambda n, t: [1, n, 3]),
    ((B, 4, 3), lambda n, t: [-1, 6]),
    ((4 * B, 6), lambda n, t: [-1, 8]),
    ((2, 3, B), lambda n, t: [6, n]),
    ((6, B), lambda n, t: [2, 3, n]),
    ((B, 1), lambda n, t: [n]),
    ((B, 2), lambda n, t: [2, -1]),
    ((B, T), lambda n, t: [n, t, 1]),
    ((2 * B * T, 2), lambda n, t: [-1, t, 2]),
):
    place = next((i for i, d in enumerate(before) if "time" in getattr(d, "names", ())), None)

    def reshaped(op, x, y, after=after, before=before):
        return op(tensor=x, shape=tf.stack(after(tf.shape(y)[0], tf.shape(y)[1])))

    add("Reshape", reshaped, floats(*before), floats(B, T))
add("Reshape", lambda op, x: op(tensor=x, shape=[4, 3]), floats(6, 2), modes=OPEN)
for axis in (0, 1, 2, -1):
    add("ExpandDims", lambda op, x, a=axis: op(input=x, axis=a), floats(T, B))
add("Squeeze", lambda op, x: op(input=x, axis=[1]), floats(B, 1, 2))
add("Squeeze", lambda op, x: op(input=x, axis=[-1, 0]), floats(1, B, 2, 1))
add("Squeeze", lambda op, x: op(input=x), floats(B, 1, 2))
for order in ([1, 0, 2], [2, 1, 0], [0, 2, 1]):
    add("Transpose", lambda op, x, p=order: op(x=x, perm=p), floats(B, T, 2))
add("ConjugateTranspose", lambda op, x: op(x=x, perm=[1, 0]), complexes(B, 2), modes=OPEN)
add(
    "BroadcastTo",
    lambda op, x, y: op(input=x, shape=tf.stack([2, tf.shape(y)[0], 3])),
    floats(B, 1),
    floats(B),
)
add(
    "BroadcastTo",
    lambda op, x, y: op(input=x, shape=tf.stack([tf.shape(y)[0], 3])),
    floats(1, 3),
    floats(B),
    modes=OPEN,
)
add("EnsureShape", lambda op, x: op(input=x, shape=[None, 2]), floats(B, 2))
for times in ([1, 2], [2, 1], [1, 1], [3, 2]):
    add("Tile", lambda op, x, t=times: op(input=x, multiples=t), floats(B, 2))
    add("Tile", lambda op, x, t=times: op(input=x, multiples=t), floats(2, 2 * B), modes=OPEN)
add("Tile", lambda op, x: op(input=x, multiples=tf.stack([1, tf.shape(x)[1]])), floats(B, T))
add("Tile", lambda op, x: op(input=x, multiples=tf.stack([tf.shape(x)[0], 1])), floats(B, 2))
for pads in ([[0, 0], [1, 2]], [[1, 0], [0, 0]], [[0, 1], [1, 0]]):
    add("Pad", lambda op, x, p=pads: op(input=x, paddings=p), floats(B, 2))
    add(
        "PadV2",
        lambda op, x, p=pads: op(input=x, paddings=p, constant_values=tf.constant(7.0, tf.float64)),
        floats(B, 2),
    )
add(
    "Pad",
    lambda op, x: op(
        input=x, paddings=tf.stack([tf.stack([0, tf.shape(x)[0]]), tf.constant([1, 0])])
    ),
    floats(B, 2),
)
add(
    "PadV2",
    lambda op, x: op(
        input=x,
        paddings=tf.stack([tf.stack([2 * tf.shape(x)[0], 0]), tf.constant([1, 0])]),
        constant_values=tf.constant(1.0, tf.float64),
    ),
    floats(2 * B, 2),
)
for mode in ("REFLECT", "SYMMETRIC"):
    add(
        "MirrorPad",
        lambda op, x, m=mode: op(input=x, paddings=[[0, 0], [1, 1]], mode=m),
        floats(B, 3),
        modes=OPEN,
    )
    add(
        "MirrorPadGrad",
        lambda op, x, m=mode: op(input=x, paddings=[[0, 0], [1, 1]], mode=m),
        floats(B, 5),
        modes=OPEN,
    )
add(
    "MirrorPad",
    lambda op, x: op(input=x, paddings=[[1, 1], [0, 0]], mode="SYMMETRIC"),
    floats(B, 3),
    modes=("static",),
)
for axis in (0, 1, -1):
    add("ConcatV2", lambda op, x, y, a=axis: op(values=[x, y], axis=a), floats(B, 2), floats(B, 2))
add("ConcatV2", lambda op, x, y: op(values=[x, y], axis=0), floats(B, 2), floats(C, 2))
add("ConcatV2", lambda op, x, y: op(values=[x, y], axis=0), floats(B, 2), floats(2, 2))
add(
    "ConcatV2",
    lambda op, x, y: op(values=[x, y, x], axis=1),
    floats(3, B),
    floats(3, 2 * B),
    modes=OPEN,
)
for axis in (0, 1, -1):
    add("Pack", lambda op, x, y, a=axis: op(values=[x, y], axis=a), floats(B, 2), floats(B, 2))
    add(
        "Unpack",
        lambda op, x, a=axis: op(value=x, num=2, axis=a),
        floats(2, 2, 2) if axis == 0 else floats(B, 2, 2),
        modes=OPEN,
    )
add("Unpack", lambda op, x: op(value=x, num=2, axis=0), floats(2, B))
add("Split", lambda op, x: op(axis=0, value=x, num_split=2), floats(2 * B, 2))
add("Split", lambda op, x: op(axis=1, value=x, num_split=2), floats(2 * B, 2))
add("Split", lambda op, x: op(axis=0, value=x, num_split=2), floats(4 * B), modes=OPEN)
add(
    "SplitV",
    lambda op, x, y: op(
        value=x, size_splits=tf.stack([tf.shape(y)[0], tf.shape(y)[0]]), axis=0, num_split=2
    ),
    floats(2 * B, 2),
    floats(B),
)
add("SplitV", lambda op, x: op(value=x, size_splits=[1, 2], axis=1, num_split=2), floats(B, 3))
add(
    "SplitV",
    lambda op, x: op(value=x, size_splits=[2, -1], axis=-1, num_split=2),
    floats(B, 3),
    modes=OPEN,
)
for begin, size in (([0, 1], [-1, 1]), ([1, 0], [-1, 2]), ([0, 0], [1, 2])):
    add(
        "Slice",
        lambda op, x, b=begin, n=size: op(input=x, begin=b, size=n),
        floats(B, 2),
        modes=("open", "unknown") if begin[0] else ("open", "static", "unknown"),
    )
for first in (0, 1):
    add(
        "Slice",
        lambda op, x, y, f=first: op(
            input=x, begin=tf.stack([f * tf.shape(y)[0], 0]), size=tf.stack([tf.shape(y)[0], 2])
        ),
        floats(2 * B, 2),
        floats(B),
    )
add("OneHot", lambda op, x: op(indices=x, depth=3, on_value=1.0, off_value=0.0), ints(3, B))
for axis in (0, 1, -1):
    add(
        "OneHot",
        lambda op, x, a=axis: op(indices=x, depth=3, on_value=1.0, off_value=0.0, axis=a),
        ints(3, B, 2),
        modes=OPEN,
    )
add(
    "SpaceToBatchND", lambda op, x: op(input=x, block_shape=[2], paddings=[[0, 0]]), floats(B, 4, 2)
)
add(
    "SpaceToBatchND",
    lambda op, x: op(input=x, block_shape=[2], paddings=[[0, 0]]),
    floats(2, 4, B),
    modes=OPEN,
)
add(
    "BatchToSpaceND",
    lambda op, x: op(input=x, block_shape=[2], crops=[[0, 0]]),
    floats(2 * B, 2, 2),
)
add("Shape Size Rank", lambda op, x: op(input=x), floats(T, B))
add("ShapeN", lambda op, x, y: op(input=[x, y]), floats(T, B), floats(2 * B), modes=OPEN)
# What Python writes as x[...].
for index in (
    lambda x: x[:, 1],
    lambda x: x[..., None],
    lambda x: x[:, None],
    lambda x: x[None],
    lambda x: x[:1],
    lambda x: x[::2],
    lambda x: x[-1],
    lambda x: x[1:],
    lambda x: x[..., 0],
    lambda x: x[:, ::-1],
    lambda x: x[None, ..., None, 0],
):
    add("StridedSlice", index, floats(B, 2, 2), modes=NOT_KNOWN)
add("StridedSlice", lambda x: x[::-1], floats(B, 2), modes=OPEN)
add("StridedSlice", lambda x: x[:-1], floats(B, 2), modes=OPEN)
for index in (
    lambda x, n: x[:n],
    lambda x, n: x[n:],
    lambda x, n: x[0:n, ..., 1:],
    lambda x, n: x[: n - 1],
    lambda x, n: x[n // 2 :],
    lambda x, n: x[: 2 * n],
):
    add(
        "StridedSlice",
        lambda x, y, i=index: i(x, tf.shape(y)[0]),
        floats(2 * B, 2, 2),
        floats(B),
        modes=NOT_KNOWN,
    )
add("StridedSlice", lambda x, y: x[:, tf.shape(y)[0] :], floats(2, 2 * B), floats(B))


def strided_gradient(name, index, rows, cols, dy):
    def made(op, y, n):
        count = tf.shape(n)[0]
        return op(shape=tf.stack([count * rows, cols]), strides=[1, 1], dy=y, **index(count))

    add("StridedSliceGrad", made, floats(*dy), floats(B))


strided_gradient(
    "column", lambda n: dict(begin=[0, 1], end=[0, 2], begin_mask=1, end_mask=1), 1, 3, (B, 1)
)
strided_gradient(
    "one column",
    lambda n: dict(begin=[0, 0], end=[0, 1], begin_mask=1, end_mask=1, shrink_axis_mask=2),
    1,
    3,
    (B,),
)
strided_gradient("first half", lambda n: dict(begin=[0, 0], end=tf.stack([n, 2])), 2, 2, (B, 2))
strided_gradient(
    "second half",
    lambda n: dict(begin=tf.stack([n, 0]), end=[0, 0], begin_mask=2, end_mask=3),
    2,
    2,
    (B, 2),
)
strided_gradient("dots", lambda n: dict(begin=[0, 0], end=[0, 1], ellipsis_mask=1), 1, 3, (B, 1))
strided_gradient("all", lambda n: dict(begin=[0, 0], end=tf.stack([n, 2])), 1, 2, (B, 2))
strided_gradient(
    "backwards",
    lambda n: dict(begin=[0, 0], end=[0, 0], begin_mask=3, end_mask=3),
    2,
    2,
    (2 * B, 2),
)
strided_gradient(
    "new axis",
    lambda n: dict(begin=[0, 0], end=[0, 0], new_axis_mask=1, begin_mask=2, end_mask=2),
    1,
    2,
    (1, B, 2),
)

# ---------------------------------------------------------------- places

add("GatherV2", lambda op, x, y: op(params=x, indices=y, axis=0), floats(4, 2), ints(4, B, 2))
add("GatherV2", lambda op, x, y: op(params=x, indices=y, axis=1), floats(B, 3), ints(3, 2))
add("GatherV2", lambda op, x, y: op(params=x, indices=y, axis=0), floats(B, 3), ints(1, B))
add("GatherV2", lambda op, x, y: op(params=x, indices=y, axis=0), floats(B, 3), ints(1, B))
add("GatherV2", lambda op, x: op(params=x, indices=tf.range(tf.shape(x)[0]), axis=0), floats(B, 3))
add(
    "GatherV2",
    lambda op, x: op(params=x, indices=tf.range(tf.shape(x)[1]), axis=1),
    floats(2, B, 3),
)
add(
    "GatherV2", lambda op, x: op(params=x, indices=tf.range(2), axis=0), floats(B, 3), one_row=False
)
add(
    "GatherV2",
    lambda op, x: op(
        params=x,
        indices=tf.where(tf.shape(x)[0] > 1, tf.range(tf.shape(x)[0]), 0),
        axis=0,
    ),
    floats(B, 3),
)
add(
    "GatherV2",
    lambda op, x, y: op(params=x, indices=y, axis=1, batch_dims=1),
    floats(B, 3, 2),
    ints(3, B, 2),
)
add(
    "GatherV2",
    lambda op, x, y: op(params=x, indices=y, axis=-2, batch_dims=1),
    floats(2, 3, B),
    ints(3, 2, T),
    modes=OPEN,
)
add(
    "GatherV2",
    lambda op, x, y: op(params=x, indices=y, axis=1, batch_dims=-1),
    floats(2, 3),
    ints(3, 2, B),
    modes=OPEN,
)
add(
    "GatherV2",
    lambda op, x, y: op(params=x, indices=y, axis=2, batch_dims=1),
    floats(2, B, 3),
    ints(3, 2, 2),
    modes=OPEN,
)
add(
    "GatherV2",
    lambda op, x, y: op(params=x, indices=y, axis=1),
    floats(2, 3),
    ints(3, B),
    modes=OPEN,
)
VARIABLE = tf.Variable(np.arange(12.0).reshape(6, 2))
add(
    "ResourceGather",
    lambda op, y: op(resource=VARIABLE.handle, indices=y, dtype=tf.float64),
    ints(6, B, 2),
    modes=OPEN,
)
add(
    "ResourceGatherNd",
    lambda op, y: op(resource=VARIABLE.handle, indices=y, dtype=tf.float64),
    ints(2, B, 2),
    modes=OPEN,
)
add("GatherNd", lambda op, x, y: op(params=x, indices=y), floats(3, 3, 2), ints(3, B, 2))
add("GatherNd", lambda op, x, y: op(params=x, indices=y), floats(3, B), ints(3, 2, 1))
add(
    "GatherNd",
    lambda op, x: op(params=x, indices=tf.range(tf.shape(x)[0])[:, None]),
    floats(B, 2),
    modes=OPEN,
)
add(
    "ScatterNd",
    lambda op, n, x: op(indices=n, updates=x, shape=[4, 2]),
    ints(4, B, 1),
    floats(B, 2),
)
add(
    "ScatterNd",
    lambda op, n, x: op(indices=n, updates=x, shape=tf.stack([4, tf.shape(x)[1]])),
    ints(4, 3, 1),
    floats(3, B),
)
add(
    "ScatterNd",
    lambda op, n, x: op(indices=n, updates=x, shape=tf.stack([tf.shape(x)[0], 2])),
    ints(1, B, 1),
    floats(B, 2),
)
add(
    "ScatterNd",
    lambda op, n, x: op(indices=n, updates=x, shape=[3, 3]),
    ints(3, T, B, 2),
    floats(T, B),
    modes=OPEN,
)
add(
    "TensorScatterAdd TensorScatterSub TensorScatterMax TensorScatterMin TensorScatterUpdate",
    lambda op, t, n, x: op(tensor=t, indices=n, updates=x),
    floats(3, 2, special=False),
    ints(3, B, 1),
    floats(B, 2),
    modes=OPEN,
)
add(
    "TensorScatterAdd TensorScatterSub TensorScatterMax TensorScatterMin TensorScatterUpdate",
    lambda op, t, n, x: op(tensor=t, indices=n, updates=x),
    floats(3, B, special=False),
    ints(3, 2, 1),
    floats(2, B),
    modes=OPEN,
)
SEGMENTED = "UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd"
add(
    SEGMENTED,
    lambda op, x, n: op(data=x, segment_ids=n, num_segments=4),
    floats(B, 2),
    ints(4, B, low=-1),
    modes=OPEN,
)
add(
    SEGMENTED,
    lambda op, x, n: op(data=x, segment_ids=n, num_segments=4),
    floats(2, T, B),
    ints(4, 2, T),
    modes=OPEN,
)
add(
    "UnsortedSegmentSum",
    lambda op, x, n: op(data=x, segment_ids=n, num_segments=tf.shape(x)[0]),
    floats(B, 2),
    ints(1, B),
)
add(
    "DenseBincount",
    lambda op, x: op(input=x, size=4, weights=tf.constant([], tf.float32)),
    ints(5, B),
)
add(
    "DenseBincount",
    lambda op, x: op(input=x, size=4, weights=tf.constant([], tf.float32)),
    ints(5, B, 3),
)
for flag in (False, True):
    add(
        "DenseBincount",
        lambda op, x, f=flag: op(
            input=x, size=4, weights=tf.constant([], tf.float64), binary_output=f
        ),
        ints(5, 2, B),
        modes=OPEN,
    )
    add(
        "DenseBincount",
        lambda op, x, f=flag: op(
            input=x, size=4, weights=tf.constant([], tf.float64), binary_output=f
        ),
        ints(5, B),
        modes=OPEN,
    )
add(
    "DenseBincount",
    lambda op, x, w: op(input=x, size=4, weights=w),
    ints(5, B),
    floats(B, special=False),
    modes=OPEN,
)
add(
    "DenseBincount",
    lambda op, x, w: op(input=x, size=4, weights=w),
    ints(5, B, 3),
    floats(B, 3, special=False),
    modes=OPEN,
)
add(
    "Bincount",
    lambda op, x: op(arr=x, size=4, weights=tf.constant([], tf.float64)),
    ints(5, B),
    modes=OPEN,
)
add(
    "Bincount",
    lambda op, x, w: op(arr=x, size=4, weights=w),
    ints(5, B),
    floats(B, special=False),
    modes=OPEN,
)

# ---------------------------------------------------------------- lists

F64 = tf.float64
LIST, FEW = lists(3, B, 2), lists(3, 2)
add("Identity ZerosLike", lambda op, x: call(op, x), LIST, modes=OPEN)
add("AddN", lambda op, x, y: op(inputs=[x, y]), LIST, LIST, modes=OPEN)
add(
    "TensorListFromTensor",
    lambda op, x: op(tensor=x, element_shape=tf.stack([tf.shape(x)[1], 2])),
    floats(3, B, 2),
)
add(
    "TensorListFromTensor",
    lambda op, x: op(tensor=x, element_shape=tf.constant(-1)),
    floats(T, B),
    modes=OPEN,
)
add(
    "TensorListSetItem",
    lambda op, x, y: op(input_handle=x, index=1, item=y),
    LIST,
    floats(B, 2),
    modes=OPEN,
)
add(
    "TensorListPushBack",
    lambda op, x, y: op(input_handle=x, tensor=y),
    LIST,
    floats(B, 2),
    modes=OPEN,
)
add(
    "TensorListPopBack",
    lambda op, x, y: op(input_handle=x, element_shape=tf.shape(y), element_dtype=F64),
    LIST,
    floats(B, 2),
    modes=OPEN,
)
add(
    "TensorListGetItem",
    lambda op, x, y: op(input_handle=x, index=1, element_shape=tf.shape(y), element_dtype=F64),
    LIST,
    floats(B, 2),
    modes=OPEN,
)
add(
    "TensorListStack",
    lambda op, x, y: op(input_handle=x, element_shape=tf.shape(y), element_dtype=F64),
    LIST,
    floats(B, 2),
    modes=OPEN,
)
add(
    "TensorListGather",
    lambda op, x, y: op(
        input_handle=x, indices=[2, 0], element_shape=tf.shape(y), element_dtype=F64
    ),
    LIST,
    floats(B, 2),
    modes=OPEN,
)
add(
    "TensorListScatterIntoExistingList",
    lambda op, x, y: op(input_handle=x, tensor=y, indices=[0, 2]),
    LIST,
    floats(2, B, 2),
    modes=OPEN,
)
add(
    "TensorListConcatV2",
    lambda op, x, y: op(
        input_handle=x,
        element_shape=tf.stack([-1, tf.shape(y)[0]]),
        leading_dims=tf.constant([], tf.int64),
        element_dtype=F64,
    ),
    lists(3, 2, B),
    floats(B),
    modes=OPEN,
)
add(
    "TensorListSplit",
    lambda op, x: op(
        tensor=x,
        element_shape=tf.stack([-1, tf.shape(x)[1]]),
        lengths=tf.constant([1, 1, 1], tf.int64),
    ),
    floats(3, B),
    modes=OPEN,
)
add(
    "TensorListScatter",
    lambda op, x: op(tensor=x, indices=[1, 0], element_shape=tf.shape(x)[1:]),
    floats(2, B),
    modes=OPEN,
)
add(
    "TensorListScatterV2",
    lambda op, x: op(tensor=x, indices=[1, 0], element_shape=tf.shape(x)[1:], num_elements=2),
    floats(2, B),
    modes=OPEN,
)
add("TensorListLength", lambda op, x: op(input_handle=x), LIST, modes=OPEN)
add(
    "TensorListElementShape",
    lambda op, x: op(input_handle=x, shape_type=tf.int32),
    LIST,
    modes=OPEN,
)
add("TensorListResize", lambda op, x: op(input_handle=x, size=2), LIST, modes=OPEN)
add(
    "TensorListConcatLists",
    lambda op, x, y: op(input_a=x, input_b=y, element_dtype=F64),
    LIST,
    LIST,
    modes=OPEN,
)
