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
    add_open(
        "Sum Mean Max", lambda op, x, a=axes: op(input=x, axis=a, keep_dims=True), floats(B, T, 2)
    )
add_open(REDUCED, lambda op, x: op(input=x, axis=[0]), floats(B, 3))
add_open(REDUCED, lambda op, x: op(input=x, axis=[0]), floats(3, B))
add_open("Sum Max Min Prod", lambda op, x: op(input=x, axis=[0]), ints(9, B, 3, low=-9))
add_open("Mean", lambda op, x: op(input=x, axis=[0]), ints(9, B, 3, low=-9))
add(
    "Mean Sum",
    lambda op, x: op(input=x, axis=[0, 1]),
    floats(T, B, dtype=tf.float16, special=False),
    tolerance=3e-2,
)
add("Mean", lambda op, x: op(input=x, axis=[0, 1]), floats(2 * B, 2))
add_open("All Any", lambda op, x: op(input=x, axis=[0]), bools(B, 3))
add_open("All Any", lambda op, x: op(input=x, axis=[1]), bools(B, 3))
# The gradient of a broadcast input is a sum along axes that are known only when the step runs.
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
add_open("BiasAddGrad", lambda op, x: op(out_backprop=x), floats(3, B))
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
add_open("Cumsum", lambda op, x: op(x=x, axis=1, exclusive=True, reverse=True), floats(B, 3))
add("Softmax LogSoftmax", lambda op, x: op(logits=x), floats(B, 3))
add("Softmax LogSoftmax", lambda op, x: op(logits=x), floats(T, B))
add("TopKV2", lambda op, x: op(input=x, k=1), floats(B, 3, special=False))
add_open("TopKV2", lambda op, x: op(input=x, k=1), floats(2, B, special=False))
add_open("NthElement", lambda op, x: op(input=x, n=1), floats(B, 3, special=False))
add_open(
    "InTopK",
    lambda op, x, y: op(predictions=x, targets=y, k=1),
    floats(B, 3, dtype=tf.float32),
    ints(3, B),
)
add(
    "InTopKV2",
    lambda op, x, y: op(predictions=x, targets=y, k=2),
    floats(B, 3, dtype=tf.float32),
    ints(3, B),
)
add_open("Cross", lambda op, x, y: op(a=x, b=y), floats(B, 3), floats(B, 3, special=False))
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


add_open(
    "LowerBound UpperBound",
    lambda op, x, y: op(sorted_inputs=x, values=y),
    sorted_rows(B, 3),
    between(0, 1, B, 2),
)
add_open("FFT IFFT FFT2D IFFT2D", lambda op, x: op(input=x), complexes(B, 2, 2))
add_open("FFT3D IFFT3D", lambda op, x: op(input=x), complexes(B, 2, 2, 2))
add_open(
    "RFFT",
    lambda op, x: op(input=x, fft_length=[4], Tcomplex=tf.complex128),
    floats(B, 4, special=False),
)
add_open("IRFFT", lambda op, x: op(input=x, fft_length=[4], Treal=tf.float64), complexes(B, 3))
add_open(
    "RFFT2D",
    lambda op, x: op(input=x, fft_length=[2, 4], Tcomplex=tf.complex128),
    floats(B, 2, 4, special=False),
)
add_open(
    "IRFFT2D", lambda op, x: op(input=x, fft_length=[2, 4], Treal=tf.float64), complexes(B, 2, 3)
)
add_open(
    "RFFT3D",
    lambda op, x: op(input=x, fft_length=[2, 2, 4], Tcomplex=tf.complex128),
    floats(B, 2, 2, 4, special=False),
)
add_open(
    "IRFFT3D",
    lambda op, x: op(input=x, fft_length=[2, 2, 4], Treal=tf.float64),
    complexes(B, 2, 2, 3),
)
add_open("RGBToHSV HSVToRGB", lambda op, x: op(images=x), between(0, 1, B, 2, 2, 3))
add_open(
    "AdjustHue",
    lambda op, x: op(images=x, delta=0.1),
    between(0, 1, B, 2, 2, 3, dtype=tf.float32),
    tolerance=1e-5,
)
add_open(
    "AdjustSaturation",
    lambda op, x: op(images=x, scale=0.5),
    between(0, 1, B, 2, 2, 3, dtype=tf.float32),
    tolerance=1e-5,
)
add_open(
    "AdjustContrastv2",
    lambda op, x: op(images=x, contrast_factor=0.5),
    between(0, 1, B, 2, 2, 3, dtype=tf.float32),
    tolerance=1e-5,
)
add_open(
    "AdjustContrastv2",
    lambda op, x: op(images=x, contrast_factor=0.5),
    between(0, 1, B, 2, 3, dtype=tf.float32),
    tolerance=1e-5,
)
add_open(
    "FakeQuantWithMinMaxVarsPerChannel",
    lambda op, x: op(inputs=x, min=[-1.0, -2.0], max=[1.0, 2.0]),
    floats(B, 2, dtype=tf.float32),
    tolerance=1e-5,
)
add("MatrixBandPart", lambda op, x: op(input=x, num_lower=1, num_upper=0), floats(B, 3, 3))
add_open("MatrixBandPart", lambda op, x: op(input=x, num_lower=1, num_upper=0), floats(B, B))
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
add_open(
    "MatrixSetDiagV3", lambda op, x, d: op(input=x, diagonal=d, k=0), floats(B, 3, 3), floats(B, 3)
)
add_open("MatrixSetDiagV3", lambda op, x, d: op(input=x, diagonal=d, k=0), floats(B, B), floats(B))
MATRIX = positive_definite(B, 2, 2)
add_open(
    "Cholesky MatrixInverse MatrixDeterminant LogMatrixDeterminant",
    lambda op, x: op(input=x),
    MATRIX,
)
add_open("Cholesky MatrixInverse", lambda op, x: op(input=x), positive_definite(B, B))
add_open("MatrixSquareRoot Lu", lambda op, x: op(input=x), MATRIX)


def complex_matrix(*dims):
    return Operand(dims, tf.complex128, positive_definite(*dims).values)


add_open("MatrixLogarithm", lambda op, x: op(input=x), complex_matrix(B, 2, 2))
add_open("SelfAdjointEigV2 Svd Qr", lambda op, x: op(input=x), MATRIX)
add_open("CholeskyGrad", lambda op, x, y: op(l=x, grad=y), MATRIX, floats(B, 2, 2, special=False))
add_open(
    "MatrixSolve MatrixTriangularSolve",
    lambda op, x, y: op(matrix=x, rhs=y),
    MATRIX,
    floats(B, 2, 1, special=False),
)
add_open(
    "MatrixTriangularSolve",
    lambda op, x, y: op(matrix=x, rhs=y),
    positive_definite(1, 2, 2),
    floats(B, 2, 1, special=False),
)
add_open(
    "MatrixTriangularSolve",
    lambda op, x, y: op(matrix=x, rhs=y),
    positive_definite(B, 2, 2),
    floats(1, 2, 1, special=False),
)
add(
    "ReverseSequence",
    lambda op, x, n: op(input=x, seq_lengths=n, seq_dim=1, batch_dim=0),
    floats(B, 3, 2),
    ints(3, B),
)
add_open(
    "ReverseSequence",
    lambda op, x, n: op(input=x, seq_lengths=n, seq_dim=0, batch_dim=1),
    floats(3, B, T),
    ints(3, B),
)
add_open(
    "ReverseSequence",
    lambda op, x: op(input=x, seq_lengths=[1, 2], seq_dim=0, batch_dim=1),
    floats(3, 2, B),
)
