"""A script that somebody wrote for one device; its data takes 20 ms an example."""

import sys
import time

import keras
import numpy as np

import keras_multigpu as kmg


class Slow:
    """64 examples."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.02)
        return np.full(4, index, "float32"), index % 2


if __name__ == "__main__":
    size = int(sys.argv[1])
    data = kmg.data.from_source(Slow(), global_batch_size=size, threads=1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    saves = keras.callbacks.ModelCheckpoint("written.keras")
    model.fit(data, epochs=2, callbacks=[saves])
    model.save("written.keras")
