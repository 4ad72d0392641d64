"""Samples of operations on each element."""

import tensorflow as tf

from keras_multigpu.partition.facts.families import SAME_SHAPES, UNARY
from samples.operands import (
    B,
    T,
    add,
    add_open,
    between,
    bools,
    call,
    complexes,
    floats,
    ints,
    texts,
)

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
ANY_FLOAT = " ".join(kind for kind in UNARY if kind not in OWN)

add_open(ANY_FLOAT, floats(B, 2))
add("Identity Neg Abs", ints(9, T, B, low=-9))
add_open(IN_UNIT, between(0.1, 0.9, B, 2))
add_open("Acosh", between(1, 3, B, 2))
add_open(OF_INTS, ints(9, B, 2))
add_open("Real Imag Angle ComplexAbs", complexes(B, 2), Tout=tf.float64)
add_open("Conj", complexes(B, 2))
add_open("StringLower StringUpper StringStrip StringLength EncodeBase64", texts(B, 2))
add_open("StringToNumber", texts(B, 2))
add_open("UnicodeScript", ints(99, B, low=65))
add_open("DecodeBase64", texts(B, words=("QUJD", "ZGVm")))
add_open("UnicodeTranscode", texts(B), input_encoding="UTF-8", output_encoding="UTF-16-BE")
add_open("StringToHashBucket StringToHashBucketFast", texts(B, 2), num_buckets=7)
add_open("StringToHashBucketStrong", texts(B, 2), num_buckets=7, key=[1, 2])
add_open("StaticRegexReplace", texts(B, 2), pattern="1", rewrite="one")
add_open("StaticRegexFullMatch", texts(B, 2), pattern="1.*")
add_open("AsString", ints(9, B, 2))
add_open("LogicalNot", bools(B, 2))
add_open("Bucketize", floats(B, 2), boundaries=[0.0, 1.0])
add_open("CheckNumerics CheckNumericsV2", floats(B, 2, special=False), message="")
for before, after in ((tf.float32, tf.float64), (tf.float64, tf.float32), (tf.float32, tf.float16)):
    add_open("Cast", floats(B, 2, dtype=before), DstT=after, tolerance=1e-5)
add_open("Cast", floats(B, 2, special=False), DstT=tf.int32)
add_open("Cast", ints(99, B, 2, low=-99), DstT=tf.float64)
add_open("Cast", ints(3, B, 2, low=-2), DstT=tf.bool)
add_open("Cast", bools(B, 2), DstT=tf.float64)

COMPARED = "Greater GreaterEqual Less LessEqual Equal NotEqual ApproximateEqual"
PLAIN = (
    "Add AddV2 Sub Mul MulNoNan RealDiv Div DivNoNan Maximum Minimum SquaredDifference Xdivy "
    "NextAfter Atan2 FloorDiv FloorMod"
)
POSITIVE = "Pow Xlogy Xlog1py Igamma Igammac"
WHOLE = "FloorDiv FloorMod Mod TruncateDiv TruncateMod"
add_open(f"{PLAIN} {COMPARED}", floats(B, 3), floats(B, 3, special=False))
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
    add("AddV2 Mul RealDiv DivNoNan", floats(*one), floats(*two, special=False))
add_open("Sub AddV2 Mul", ints(9, B, 2, low=-9), ints(9, B, 2, low=-9))
add_open(POSITIVE, between(0.1, 2, B, 3), between(0.1, 2, B, 3))
add_open("Zeta", between(1.5, 3, B), between(1, 2, B))
add_open("Polygamma", lambda op, x, y: call(op, tf.round(x), y), between(1, 3, B), between(1, 2, B))
add_open("Polygamma", lambda op, y: call(op, tf.constant(2.0, tf.float64), y), between(1, 2, B))
add_open(
    f"{WHOLE} Div BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift",
    ints(99, B, 2),
    ints(5, B, 2, low=1),
)
add_open("LogicalAnd LogicalOr", bools(B, 3), bools(3))
add_open("Complex", floats(B, 2, special=False), floats(B, 2, special=False), Tout=tf.complex128)
add_open("Betainc", between(1, 2, B), between(1, 2, B), between(0.1, 0.9, B))
add("SelectV2", bools(B, 1), floats(B, 3), floats(3))
add_open("SelectV2", bools(3), floats(B, 3), floats(B, 3))
add("Select", bools(B), floats(B, 3), floats(B, 3))
add_open("Select", bools(T, B), floats(T, B), floats(T, B))
add_open("Select", bools(), floats(B, 2), floats(B, 2))
add_open(
    "ClipByValue",
    lambda op, x: op(
        t=x,
        clip_value_min=tf.constant(-1.0, tf.float64),
        clip_value_max=tf.constant(1.0, tf.float64),
    ),
    floats(B, 3),
)
add_open(
    "ClipByValue",
    lambda op, x, y: op(t=x, clip_value_min=y, clip_value_max=y + 1),
    floats(B, 3),
    floats(B, 3),
)
add_open(
    "Substr",
    lambda op, x, n: op(input=x, pos=n, len=n),
    texts(B, words=("abc", "defg")),
    ints(2, B),
)
add_open("StringJoin", lambda op, x, y: op(inputs=[x, y]), texts(B, 2), texts(B, 2))
add_open("StringJoin", lambda op, x: op(inputs=[x, tf.constant("!")]), texts(B, 2))
add_open(
    "RegexReplace",
    lambda op, x: op(input=x, pattern=tf.constant("1"), rewrite=tf.constant("2")),
    texts(B, 2),
)
add_open("RegexFullMatch", lambda op, x: op(input=x, pattern=tf.constant("1.*")), texts(B, 2))

GRADIENTS = [
    kind for kind in SAME_SHAPES if kind not in ("AddN", "FakeQuantWithMinMaxArgsGradient")
]
add_open(" ".join(GRADIENTS), between(0.5, 2, B, 2), between(0.5, 2, B, 2))
add_open("ReluGrad RsqrtGrad", between(0.5, 2, T, 2), between(0.5, 2, T, 2))
add_open(
    "FakeQuantWithMinMaxArgsGradient",
    floats(B, 2, dtype=tf.float32),
    floats(B, 2, dtype=tf.float32, special=False),
)
add_open("FakeQuantWithMinMaxArgs", floats(B, 2, dtype=tf.float32))
add_open(
    "AddN",
    lambda op, x, y, z: op(inputs=[x, y, z]),
    floats(B, 2),
    floats(B, 2, special=False),
    floats(B, 2, special=False),
)
add_open("IdentityN", lambda op, x, y: op(input=[x, y]), floats(B, 2), floats(3, B))
add("Bitcast", floats(B, 2), type=tf.int64)
add_open("Bitcast", floats(B), type=tf.int32)
add_open("Bitcast", ints(9, B, 2), type=tf.int64)
add("BiasAdd", floats(B, 3), floats(3))
add("BiasAdd", floats(B, 3, T), floats(3), data_format="NCHW")
add_open("BiasAdd", floats(2, B), floats(B))
add_open("FakeQuantWithMinMaxVars", floats(B, 2, dtype=tf.float32), min=-1.0, max=1.0)
add_open(
    "FakeQuantWithMinMaxVars",
    floats(B, 2, dtype=tf.float32),
    between(-3, -1, dtype=tf.float32),
    max=1.0,
)
TABLE = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer([0, 1, 2], [5, 6, 7], tf.int64, tf.int64), -1
)
add_open(
    "LookupTableFindV2",
    lambda op, x: op(
        table_handle=TABLE.resource_handle, keys=x, default_value=tf.constant(-1, tf.int64)
    ),
    ints(4, B, 2, dtype=tf.int64),
)
