"""Types of operations that behave alike, for their rules and for the lengths of their results."""

from typing import Any

# Inputs of an operation.
NONE, FIRST, SECOND, BOTH, ALL = slice(0), slice(1), slice(1, 2), slice(2), slice(None)


def table(entries: dict[str, Any]) -> dict[str, Any]:
    """Turn a table with several types of operations in one key into one with a key for each."""
    return {kind: value for kinds, value in entries.items() for kind in kinds.split()}


UNARY = (
    "Identity StopGradient PreventGradient Snapshot Neg Abs Exp Expm1 Log Log1p Sqrt Rsqrt Square "
    "Reciprocal Inv Sign Floor Ceil Round Rint Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh "
    "Acosh Atanh Sigmoid Relu Relu6 Elu Selu Softplus Softsign LeakyRelu Erf Erfc Erfinv Ndtri "
    "Lgamma Digamma IsNan IsInf IsFinite LogicalNot Cast CheckNumerics CheckNumericsV2 ZerosLike "
    "OnesLike Real Imag Conj Angle ComplexAbs Invert PopulationCount BesselI0 BesselI0e BesselI1 "
    "BesselI1e Bucketize FakeQuantWithMinMaxArgs AsString StringLower StringUpper StringStrip "
    "StringLength StringToNumber StringToHashBucket StringToHashBucketFast "
    "StringToHashBucketStrong StaticRegexReplace StaticRegexFullMatch EncodeBase64 DecodeBase64 "
    "UnicodeScript UnicodeTranscode"
).split()
BROADCASTING = (
    "Add AddV2 Sub Mul MulNoNan RealDiv Div DivNoNan FloorDiv FloorMod Mod TruncateMod TruncateDiv "
    "Maximum Minimum Pow SquaredDifference Greater GreaterEqual Less LessEqual Equal NotEqual "
    "ApproximateEqual LogicalAnd LogicalOr Xlogy Xlog1py Xdivy Atan2 Igamma Igammac Betainc Zeta "
    "Polygamma BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift NextAfter Complex SelectV2 "
    "ClipByValue Substr StringJoin RegexReplace RegexFullMatch"
).split()
SAME_SHAPES = (
    "AddN ReluGrad Relu6Grad EluGrad SeluGrad SoftplusGrad SoftsignGrad LeakyReluGrad TanhGrad "
    "SigmoidGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad FakeQuantWithMinMaxArgsGradient"
).split()
ELEMENTWISE = frozenset([*UNARY, *BROADCASTING, *SAME_SHAPES])

# The input that these write to a list.
LIST_WRITES = {"TensorListPushBack": 1, "TensorListSetItem": 2}

# The inputs whose first axis is that of the examples. If one has a single entry for all examples,
# every replica takes it.
EXAMPLES: dict[str, tuple[int, ...]] = table(
    {
        "Conv Conv2D Conv3D DepthwiseConv2dNative Dilation2D": (0,),
        "MaxPool MaxPoolV2 MaxPool3D AvgPool AvgPool3D LRN": (0,),
        "MaxPoolGrad MaxPoolGradV2 MaxPoolGradGrad MaxPoolGradGradV2": (0, 1, 2),
        "MaxPool3DGrad MaxPool3DGradGrad LRNGrad": (0, 1, 2),
        "MaxPoolWithArgmax": (0,),
        "MaxPoolGradWithArgmax": (0, 1, 2),
        "AvgPoolGrad AvgPool3DGrad": (1,),
        "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput": (2,),
        "Dilation2DBackpropInput": (0, 2),
        "SpaceToDepth DepthToSpace ExtractImagePatches ExtractVolumePatches": (0,),
        "ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea": (0,),
        "ResizeNearestNeighborGrad ScaleAndTranslate": (0,),
        "ResizeBilinearGrad ResizeBicubicGrad ScaleAndTranslateGrad": (0, 1),
        "ImageProjectiveTransformV2 ImageProjectiveTransformV3": (0, 1),
        "CropAndResize": (1, 2),
        "DrawBoundingBoxes DrawBoundingBoxesV2": (0, 1),
        "SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits": (0, 1),
    }
)
