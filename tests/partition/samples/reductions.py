"""Samples of sums, orders and matrices along axes."""

import numpy as np
import tensorflow as tf
from validator import Operand

from samples.operands import (
    B,
    T,
    add,
    add_open,
    between,
    bools,
    complexes,
    floats,
    ints,
    positive_definite,
    raw,
)

REDUCED = "Sum Mean Max Min Prod EuclideanNorm"
for axes in (0, [0], [1], [0, 1], [-1], [], [1, 2], [0, 2]):
    add(
        "Sum Mean Max",
        lambda op, x, a=axes: op(input=x, axis=tf.constant(a, tf.int32)),
        floats(B, T, 2),
    )
for axes in ([0], [1], [0, 2]):
    add_open("Sum Mean Max", floats(B, T, 2), axis=axes, keep_dims=True)
add_open(REDUCED, floats(B, 3), axis=[0])
add_open("Mean", ints(9, B, 3, low=-9), axis=[0])
add_open(REDUCED, floats(3, B), axis=[0])
add_open("Sum Max Min Prod", ints(9, B, 3, low=-9), axis=[0])
add("Mean Sum", floats(T, B, dtype=tf.float16, special=False), axis=[0, 1], tolerance=3e-2)
add("Mean", floats(2 * B, 2), axis=[0, 1])
add_open("All Any", bools(B, 3), axis=[0])
add_open("All Any", bools(B, 3), axis=[1])
# The gradient of a broadcast input is a sum along axes that are known only when the step runs.
add(
    "Sum",
    lambda op, x: op(
        input=x, axis=raw.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.constant([1, 3]))[1]
    ),
    floats(B, 3),
    one_row=False,
)
add("BiasAddGrad", floats(B, 3))
add("BiasAddGrad", floats(B, 3, T), data_format="NCHW")
add_open("BiasAddGrad", floats(3, B))
add("L2Loss", floats(T, B))
for axis in (0, 1, -1):
    add("ArgMax ArgMin", floats(B, T, 3, special=False), dimension=axis)
    add("Cumsum Cumprod CumulativeLogsumexp", floats(B, T, 2, special=False), axis=axis)
    add("ReverseV2", floats(B, T, 2), axis=[axis])
    add("Roll", floats(B, T, 2), shift=[1], axis=[axis])
add_open("Cumsum", floats(B, 3), axis=1, exclusive=True, reverse=True)
add("Softmax LogSoftmax", floats(B, 3))
add("Softmax LogSoftmax", floats(T, B))
add("TopKV2", floats(B, 3, special=False), k=1)
add_open("TopKV2", floats(2, B, special=False), k=1)
add_open("NthElement", floats(B, 3, special=False), n=1)
add_open("InTopK", floats(B, 3, dtype=tf.float32), ints(3, B), k=1)
add("InTopKV2", floats(B, 3, dtype=tf.float32), ints(3, B), k=2)
add_open("Cross", floats(B, 3), floats(B, 3, special=False))
add_open(
    "LowerBound UpperBound",
    lambda op, x, y: op(sorted_inputs=tf.sort(x), values=y),
    between(0, 1, B, 3),
    between(0, 1, B, 2),
)
add_open(
    "LowerBound UpperBound",
    lambda op, y: op(sorted_inputs=tf.constant([[0.0, 0.5]], tf.float64), values=y),
    between(0, 1, 1, B),
)


def sorted_rows(*dims):
    return Operand(dims, tf.float64, lambda random, shape: np.sort(random.random(shape)))


add_open("LowerBound UpperBound", sorted_rows(B, 3), between(0, 1, B, 2))
add_open("FFT IFFT FFT2D IFFT2D", complexes(B, 2, 2))
add_open("FFT3D IFFT3D", complexes(B, 2, 2, 2))
add_open("RFFT", floats(B, 4, special=False), fft_length=[4], Tcomplex=tf.complex128)
add_open("IRFFT", complexes(B, 3), fft_length=[4], Treal=tf.float64)
add_open("RFFT2D", floats(B, 2, 4, special=False), fft_length=[2, 4], Tcomplex=tf.complex128)
add_open("IRFFT2D", complexes(B, 2, 3), fft_length=[2, 4], Treal=tf.float64)
add_open("RFFT3D", floats(B, 2, 2, 4, special=False), fft_length=[2, 2, 4], Tcomplex=tf.complex128)
add_open("IRFFT3D", complexes(B, 2, 2, 3), fft_length=[2, 2, 4], Treal=tf.float64)
COLORS = between(0, 1, B, 2, 2, 3, dtype=tf.float32)
add_open("RGBToHSV HSVToRGB", between(0, 1, B, 2, 2, 3))
add_open("AdjustHue", COLORS, delta=0.1)
add_open("AdjustSaturation", COLORS, scale=0.5)
add_open(
    "AdjustContrastv2",
    COLORS,
    contrast_factor=0.5,
)
add_open(
    "AdjustContrastv2",
    between(0, 1, B, 2, 3, dtype=tf.float32),
    contrast_factor=0.5,
)
add_open(
    "FakeQuantWithMinMaxVarsPerChannel",
    floats(B, 2, dtype=tf.float32),
    min=[-1.0, -2.0],
    max=[1.0, 2.0],
)
add("MatrixBandPart", floats(B, 3, 3), num_lower=1, num_upper=0)
add_open("MatrixBandPart", floats(B, B), num_lower=1, num_upper=0)
add_open(
    "MatrixDiagPartV3",
    lambda op, x: op(input=x, k=0, padding_value=tf.constant(0.0, tf.float64)),
    floats(B, 3, 3),
)
add_open(
    "MatrixDiagPartV3",
    lambda op, x: op(input=x, k=[-1, 1], padding_value=tf.constant(0.0, tf.float64)),
    floats(B, 3, 3),
)
add_open(
    "MatrixDiagPartV3",
    lambda op, x: op(input=x, k=0, padding_value=tf.constant(0.0, tf.float64)),
    floats(B, B),
)
add_open(
    "MatrixDiagV3",
    lambda op, x: op(
        diagonal=x, k=0, num_rows=-1, num_cols=-1, padding_value=tf.constant(0.0, tf.float64)
    ),
    floats(B, 3),
)
add_open(
    "MatrixDiagV3",
    lambda op, x: op(
        diagonal=x, k=0, num_rows=-1, num_cols=-1, padding_value=tf.constant(0.0, tf.float64)
    ),
    floats(B),
)
add_open(
    "MatrixDiagV3",
    lambda op, x: op(
        diagonal=x, k=[-1, 0], num_rows=3, num_cols=3, padding_value=tf.constant(0.0, tf.float64)
    ),
    floats(B, 2, 3),
)
add_open("MatrixSetDiagV3", floats(B, 3, 3), floats(B, 3), k=0)
add_open("MatrixSetDiagV3", floats(B, B), floats(B), k=0)
MATRIX = positive_definite(B, 2, 2)
add_open("Cholesky MatrixInverse MatrixDeterminant LogMatrixDeterminant", MATRIX)
add_open("Cholesky MatrixInverse", positive_definite(B, B))
add_open("MatrixSquareRoot Lu", MATRIX)


def complex_matrix(*dims):
    return Operand(dims, tf.complex128, positive_definite(*dims).values)


add_open("MatrixLogarithm", complex_matrix(B, 2, 2))
add_open("SelfAdjointEigV2 Svd Qr", MATRIX)
add_open("CholeskyGrad", MATRIX, floats(B, 2, 2, special=False))
add_open("MatrixSolve MatrixTriangularSolve", MATRIX, floats(B, 2, 1, special=False))
add_open("MatrixTriangularSolve", positive_definite(1, 2, 2), floats(B, 2, 1, special=False))
add_open("MatrixTriangularSolve", positive_definite(B, 2, 2), floats(1, 2, 1, special=False))
add("ReverseSequence", floats(B, 3, 2), ints(3, B), seq_dim=1, batch_dim=0)
add_open("ReverseSequence", floats(3, B, T), ints(3, B), seq_dim=0, batch_dim=1)
add_open("ReverseSequence", floats(3, 2, B), seq_lengths=[1, 2], seq_dim=0, batch_dim=1)
