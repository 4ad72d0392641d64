"""Large batches: a learning rate that fits them, a warm-up, and batches that grow.

    python examples/scale_batch_and_warm_up.py                  # all GPUs, or one CPU
    python examples/scale_batch_and_warm_up.py --replicas 2     # two GPUs, or a CPU split in two

A network learns six birds by their songs, which the script sings. Pictures: pip install matplotlib
"""

import argparse

import keras
import numpy as np

import keras_multigpu as kmg
from keras_multigpu.callbacks import BatchSizeScaling, LearningRateWarmup

RATE = 0.01  # Good for batches of 32.
SAMPLES = 8000  # A recording takes a second.

# The tones of each song: its begin and length in seconds, its first and last pitch in Hz.
SONGS = {
    "cuckoo": [(0.1, 0.25, 720, 700), (0.45, 0.35, 570, 550)],
    "tawny owl": [(0.1, 0.2, 480, 500), (0.4, 0.4, 500, 430)],
    "curlew": [(0.1, 0.35, 900, 1200), (0.45, 0.35, 1200, 2200)],
    "great tit": [(0.12 * n, 0.09, 3200 - n % 2 * 800, 3200 - n % 2 * 800) for n in range(7)],
    "chaffinch": [(0.08 * n, 0.06, 3200 - 150 * n, 2600 - 150 * n) for n in range(9)],
    "wren": [(0.04 * n, 0.03, 2700, 3100) for n in range(20)],
}


def recording(song, random):
    """A second of a song in the wind: high or low, quick or slow, near or far."""
    sound = random.normal(0, 0.4, SAMPLES)
    pitch, tempo, late, near = random.uniform((0.8, 0.9, 0, 0.2), (1.2, 1.1, 0.1, 1))
    for begin, length, first, last in song:
        part = np.linspace(0, 1, int(length * tempo * SAMPLES))
        turns = np.cumsum(first + (last - first) * part) * pitch / SAMPLES
        place = int((begin * tempo + late) * SAMPLES)
        sound[place : place + len(part)] += near * np.sin(np.pi * part) * np.sin(2 * np.pi * turns)
    return sound.astype("float32")


def load(new=300):
    """Recordings and the numbers of their birds: 1200 to train with, and new ones."""
    random = np.random.default_rng(0)
    birds = random.integers(len(SONGS), size=1200 + new)
    sounds = np.stack([recording([*SONGS.values()][bird], random) for bird in birds])
    train = kmg.data.from_arrays(sounds[new:], birds[new:], seed=1)
    return train, (sounds[:new], birds[:new])


def build_model():
    """A spectrogram and a small convnet, compiled with a rate that is good for batches of 32."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((SAMPLES,)),
            keras.layers.MelSpectrogram(256, 128, sampling_rate=SAMPLES, num_mel_bins=32),
            keras.layers.LayerNormalization(axis=(1, 2), center=False, scale=False),
            keras.layers.Reshape((32, -1, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(len(SONGS), activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(name, data, size, callbacks, epochs, strategy):
    """Train a new model; its accuracy on new recordings, and its history."""
    recordings, new = data
    model = kmg.distribute(build_model(), strategy)
    batches = recordings.with_(global_batch_size=size)
    history = model.fit(batches, epochs=epochs, verbose=0, callbacks=callbacks).history
    accuracy = model.evaluate(*new, verbose=0, return_dict=True)["accuracy"]
    print(f"{name:26} {int(model.optimizer.iterations):4} steps  accuracy {accuracy:.1%}")
    return accuracy, history


def draw(history):
    """Write a spectrogram of each song, and the rate and the batch of each epoch, to PNG files."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.8), layout="constrained", dpi=80)
    spectrogram, random = build_model().layers[0], np.random.default_rng(0)
    for axes, (bird, song) in zip(figure.subplots(1, len(SONGS)), SONGS.items(), strict=True):
        axes.imshow(spectrogram(recording(song, random)), origin="lower", cmap="magma", aspect=2)
        axes.set_title(bird, fontsize=14)
        axes.set_axis_off()
    figure.savefig("songs.png")
    figure = Figure(figsize=(8, 4.2), layout="constrained", dpi=100)
    upper, lower = figure.subplots(2, 1, sharex=True)
    epochs = range(1, 1 + len(history["loss"]))
    upper.plot(epochs, history["learning_rate"], color="#2a6f97", linewidth=2)
    upper.axhline(RATE, color="#8d99a6", linewidth=1, linestyle="--")
    upper.set(ylabel="learning rate", ylim=(0, None))
    lower.step(epochs, history["global_batch_size"], color="#bc6c25", linewidth=2, where="mid")
    lower.set(ylabel="global batch, examples", xlabel="epoch", ylim=(0, None))
    figure.savefig("scale_batch_and_warm_up.png")


def main(epochs=9, replicas=None):
    """Train in four ways; returns the accuracy of the last one."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    data = load()
    # --8<-- [start:small]
    train("batches of 32", data, 32, [], epochs, strategy)
    train("batches of 256", data, 256, [], epochs, strategy)
    # --8<-- [end:small]
    # --8<-- [start:scaled]
    callbacks = [BatchSizeScaling(32), LearningRateWarmup(epochs=3)]
    train("256, scaled rate, warm-up", data, 256, callbacks, epochs, strategy)
    # --8<-- [end:scaled]
    # --8<-- [start:growing]
    scaling = BatchSizeScaling(32, schedule={epochs // 3: 128, 2 * epochs // 3: 256})
    callbacks = [scaling, LearningRateWarmup(epochs=2)]
    accuracy, history = train("64, then 128, then 256", data, 64, callbacks, epochs, strategy)
    # --8<-- [end:growing]

    draw(history)
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
