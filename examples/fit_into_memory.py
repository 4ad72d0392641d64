"""What will a training step hold on each device? A network for audio, asked before it is trained.

    python examples/fit_into_memory.py                  # all GPUs, or one CPU
    python examples/fit_into_memory.py --replicas 2     # two GPUs, or a CPU split in two

The sounds are made by the script.
"""

import argparse

import keras
import numpy as np

import keras_multigpu as kmg

LENGTH, BATCH = 512, 128


def sounds(number):
    """Tones of three pitches in noise, and which pitch it is."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, number)
    times = np.arange(LENGTH) / LENGTH + random.random((number, 1))
    tones = np.sin(2 * np.pi * times * np.array([20, 45, 100])[labels, None])
    return (tones + random.normal(0, 0.5, tones.shape))[..., None].astype("float32"), labels


def build_model(scope):
    """Two convolutions, in a scope that says what is recomputed."""
    with scope:
        parts = [keras.layers.Conv1D(16, 9, 2, "same", activation="gelu") for _ in range(2)]
    ends = [keras.layers.GlobalMaxPooling1D(), keras.layers.Dense(3, "softmax")]
    return keras.Sequential([keras.Input((LENGTH, 1)), *parts, *ends])


def main(epochs, replicas):
    """What a step would hold with all activations and with few; then train; the accuracy."""
    strategy = kmg.strategy(devices=replicas)
    for mode in (None, "full"):
        keras.utils.set_random_seed(1)
        model = build_model(keras.RematScope(mode=mode))
        model = kmg.distribute(model, strategy, shard="optimizer")
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        print(f"RematScope(mode={mode!r}):")
        kmg.memory(model, batch_size=BATCH)
    history = model.fit(*sounds(2048), batch_size=BATCH, epochs=epochs, verbose=2)
    return history.history["accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--replicas", type=int, help="devices to use; by default all GPUs")
    chosen = parser.parse_args()
    print(f"Accuracy {main(chosen.epochs, chosen.replicas):.2f}")
