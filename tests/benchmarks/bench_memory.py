"""Memory: of whole trainings beside stock Keras's, and what `kmg.memory` says of activations.

    python tests/benchmarks/bench_memory.py [peak|calls|estimate] [--write]

Each training has a process of its own; on logical CPU devices all replicas share its memory. A peak
is that over what the process held after it had trained a small model, and that of a call with
weights in parts over what it held before. Of an estimate only the difference between two batch
sizes counts, so that what does not depend on the batch falls out.
"""

import contextlib
import ctypes
import functools
import gc
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from report import EXACT_MEMORY, alone, main, measures, resident, split_cpu, start_peak

import keras_multigpu as kmg

BATCH = 16
SIDES = ["stock", "ours", "ours, optimizer sharded", "ours, weights sharded"]
ON_FOUR = "ours, weights sharded on 4"


def dense(width=3072):
    """Six layers, each of 36 MiB by default."""
    parts = [layers.Dense(width, "relu") for _ in range(6)]
    return keras.Sequential([keras.Input((width,)), *parts, layers.Dense(1)])


def convnet():
    x = inputs = keras.Input((32, 32, 3))
    for filters in (128, 256, 512, 1024):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def transformer():
    x = inputs = keras.Input((16,), dtype="int32")
    x = layers.Embedding(4000, 1024)(x)
    for _ in range(3):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 256)(normal, normal)])
        wide = layers.Dense(4096, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(1024)(wide)])
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def small():
    """A model that starts TensorFlow, Keras and this package."""
    return keras.Sequential([keras.Input((4,)), layers.Dense(1)])


TRAINED = {
    "dense": dense,
    "convnet": convnet,
    "transformer": transformer,
    "small dense": lambda: dense(1024),
}


@functools.cache
def stock_strategy(devices):
    """One for both trainings, because two mix up their sums."""
    return tf.distribute.MirroredStrategy(devices)


def trained(side, devices, make):
    """A model after some steps."""
    is_stock = side == "stock"
    with stock_strategy(tuple(devices)).scope() if is_stock else contextlib.nullcontext():
        model = make()
        if not is_stock:
            shard = side.split()[1] if "sharded" in side else None
            model = kmg.distribute(model, devices=devices, shard=shard)
        model.compile("adam", "mse", jit_compile=False)
    shape, dtype = model.inputs[0].shape[1:], model.inputs[0].dtype
    x = np.random.default_rng(0).integers(0, 9, (BATCH, *shape)).astype(dtype)
    for _ in range(2):
        model.fit(x, np.zeros((BATCH, 1)), BATCH, epochs=3, verbose=0)
    return model


def measure_peak(side, name):
    """In sizes of the weights."""
    devices = split_cpu(4 if side == ON_FOUR else 2)
    trained(side, devices, small)
    before = resident("VmRSS")
    start_peak()
    model = trained(side, devices, TRAINED[name])
    weights = sum(weight.nbytes for weight in model.get_weights()) / 2**20
    return (resident("VmHWM") - before) / weights


def peaks(rounds):
    for name in list(TRAINED)[:3]:
        stock, *ours = (peak(side, name) for side in SIDES)
        on_four = peak(ON_FOUR, name)
        cells = [f"{each:.1f}" for each in (stock, *ours)]
        each = f"{on_four:.1f}, {on_four / 4 / (ours[-1] / 2):.2f}"
        yield name, *cells, f"{ours[0] / stock:.2f}", each


def peak(side, name):
    return alone(__file__, "peak", side, name, **EXACT_MEMORY)[0]


def calls_of(model, folder):
    """Calls of a model by name; some need the files of those before."""
    x, y = np.zeros((BATCH, model.inputs[0].shape[1])), np.zeros((BATCH, 1))
    fit = functools.partial(model.fit, x, y, BATCH, verbose=0)

    def checkpoint():
        return [kmg.callbacks.ResumableCheckpoint(f"{folder}/checkpoints")]

    def load():
        with keras.device("cpu"):
            return keras.saving.load_model(f"{folder}/model.keras")

    return {
        "`fit`, the first": fit,
        "`fit`": fit,
        "`evaluate`": lambda: model.evaluate(x, y, BATCH, verbose=0),
        "`predict`": lambda: model.predict(x, BATCH, verbose=0),
        "`save_weights`": lambda: model.save_weights(f"{folder}/model.weights.h5"),
        "`load_weights`": lambda: model.load_weights(f"{folder}/model.weights.h5"),
        "`save` as `.keras`": lambda: model.save(f"{folder}/model.keras"),
        "`load_model` of that": load,
        "`fit` with a checkpoint": lambda: fit(callbacks=checkpoint()),
        "`fit` that resumes": lambda: fit(epochs=2, callbacks=checkpoint()),
    }


def measure_calls():
    """By how much each call goes beyond what is held, in sizes of the weights."""
    devices = split_cpu(2)
    trained(SIDES[-1], devices, small)
    model = kmg.distribute(dense(), devices=devices, shard="weights")
    model.compile("adam", "mse", jit_compile=False)
    weights, found = sum(4 * np.prod(each.shape) for each in model.weights) / 2**20, []
    with tempfile.TemporaryDirectory() as folder:
        for call in calls_of(model, folder).values():
            gc.collect()
            before = resident("VmRSS")
            start_peak()
            call()
            found.append((resident("VmHWM") - before) / weights)
    return " ".join(map(str, found))


def calls(rounds):
    names = calls_of(small(), "")
    for name, more in zip(names, alone(__file__, "calls", **EXACT_MEMORY), strict=True):
        yield name, f"{more:.1f}"


def language_model():
    """Predicts the next word, of 2,000."""
    x = inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(2000, 64)(x)
    for _ in range(2):
        normal = layers.LayerNormalization()(x)
        attended = layers.MultiHeadAttention(4, 16)(normal, normal, use_causal_mask=True)
        x = layers.Add()([x, layers.Dropout(0.1)(attended)])
        wide = layers.Dense(256, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(wide)])
    return keras.Model(inputs, layers.Dense(2000, "softmax")(x))


def lstm():
    recurrent = [layers.LSTM(128, return_sequences=True), layers.LSTM(128)]
    return keras.Sequential([keras.Input((50, 32)), *recurrent, layers.Dense(10, "softmax")])


def unet():
    x = inputs = keras.Input((64, 64, 3))
    known = []

    def convolved(x, filters):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    for filters in (16, 32, 64):
        x = convolved(x, filters)
        known.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolved(x, 128)
    for filters in (64, 32, 16):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = convolved(layers.Concatenate()([x, known.pop()]), filters)
    return keras.Model(inputs, layers.Conv2D(2, 1, activation="softmax")(x))


def vgg():
    parts = [keras.Input((32, 32, 3))]
    for filters, count in ((32, 2), (64, 2), (128, 3)):
        for _ in range(count):
            parts.append(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        parts.append(layers.MaxPooling2D())
    parts += [layers.Flatten(), layers.Dense(256, "relu"), layers.Dense(10, "softmax")]
    return keras.Sequential(parts)


def resnet():
    x = inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, padding="same")(x)
    for filters, strides in ((32, 1), (64, 2), (128, 2)):
        short = layers.Conv2D(filters, 1, strides)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Conv2D(filters, 3, strides, "same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Add()([short, layers.Conv2D(filters, 3, padding="same")(x)])
    return keras.Model(inputs, layers.Dense(10, "softmax")(layers.GlobalAveragePooling2D()(x)))


def mobilenet():
    return keras.applications.MobileNetV2(weights=None, classes=10, input_shape=(96, 96, 3))


ESTIMATED = {
    "U-Net": (unet, (16, 64)),
    "transformer": (language_model, (16, 64)),
    "LSTM": (lstm, (128, 512)),
    "VGG-like": (vgg, (64, 256)),
    "ResNet-like": (resnet, (64, 256)),
    "MobileNetV2": (mobilenet, (16, 64)),
}
"""How to make each model, and the two batch sizes."""


def compiled(name):
    model = kmg.distribute(ESTIMATED[name][0](), devices=1, self_check=False)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    return model


def measure_estimate(name, size):
    """How much more memory a step takes than what is held before."""
    model, size = compiled(name), int(size)
    inputs, outputs = model.inputs[0], model.outputs[0]
    x = np.zeros((size, *inputs.shape[1:]), inputs.dtype)
    y = np.zeros((size, *outputs.shape[1:-1]), "int32")
    model.train_on_batch(x, y)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    start_peak()
    for _ in range(3):
        model.train_on_batch(x, y)
    return resident("VmHWM") - before


def estimates(rounds):
    for name, (_, sizes) in ESTIMATED.items():
        model, (few, many) = compiled(name), sizes
        found = [kmg.memory(model, batch_size=size).devices[0] for size in sizes]
        told = [(each.update + each.activations) / 2**20 for each in found]
        threshold = {"MALLOC_MMAP_THRESHOLD_": EXACT_MEMORY["MALLOC_MMAP_THRESHOLD_"]}
        true = [alone(__file__, "estimate", name, size, **threshold)[0] for size in sizes]
        estimate, truth = ((b - a) / (many - few) for a, b in (told, true))
        ratio = f"{estimate / truth:.2f}"
        yield name, f"{few}, {many}", f"{estimate:.2f}", f"{truth:.2f}", ratio


HEAD = " | ".join(["model", *SIDES, "ours / stock", "weights sharded on 4, each / each of 2"])
TABLES = {
    "peak": (HEAD, peaks),
    "calls": ("weights in parts, Adam, six dense layers | beyond what is held", calls),
    "estimate": (
        "model | batch sizes | MiB an example, estimated | measured | ratio",
        estimates,
    ),
}

if __name__ == "__main__":
    if asked := measures():
        measured = {"peak": measure_peak, "calls": measure_calls, "estimate": measure_estimate}
        print(measured[asked[0]](*asked[1:]))
    else:
        main(__doc__, TABLES)
