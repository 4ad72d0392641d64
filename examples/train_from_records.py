"""Train on shards of records: TFRecord files, or tar archives as WebDataset has them.

    python examples/train_from_records.py                      # writes shards of digits, reads them
    python examples/train_from_records.py --kind tfrecord
    python examples/train_from_records.py --replicas 2         # two GPUs, or a CPU split in two

You need: pip install google-crc32c scikit-learn
"""

import argparse
import io
import tarfile
from pathlib import Path

import keras
import tensorflow as tf

import keras_multigpu as kmg

FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def write_shards(folder, kind):
    """Store handwritten digits as PNG files in tar archives, or in TFRecord files."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images * 255 / 16).astype("uint8").reshape(-1, 8, 8, 1)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(4):
        rows = range(shard, len(images), 4)
        pngs = [(row, tf.io.encode_png(images[row]).numpy(), int(labels[row])) for row in rows]
        if kind == "tar":
            with tarfile.open(folder / f"digits-{shard}.tar", "w") as archive:
                for row, png, label in pngs:
                    for ending, content in (("png", png), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{row:05}.{ending}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
        else:
            with tf.io.TFRecordWriter(str(folder / f"digits-{shard}.tfrecord")) as writer:
                for _, png, label in pngs:
                    image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[png]))
                    label = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
                    features = tf.train.Features(feature={"image": image, "label": label})
                    writer.write(tf.train.Example(features=features).SerializeToString())


# --8<-- [start:examples]
def of_tfrecord(record):
    found = tf.io.parse_single_example(record, FEATURES)
    return tf.io.decode_png(found["image"], channels=1), found["label"]


class TarSamples:
    """Samples of tar archives, in any order: the files that have one name up to the first dot."""

    def __init__(self, paths):
        samples = {}
        for path in paths:
            with tarfile.open(path, "r:") as archive:
                for file in archive:
                    key, ending = file.name.split(".", 1)
                    place = file.offset_data, file.size
                    samples.setdefault((path, key), {})[ending] = place
        self.samples = list(samples.items())

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        (path, _), places = self.samples[index]
        # Threads read at the same time, so each opens the file for itself.
        with open(path, "rb") as file:
            return {ending: read_at(file, *place) for ending, place in places.items()}


def read_at(file, start, size):
    file.seek(start)
    return file.read(size)


def of_tar(sample):
    return tf.io.decode_png(sample["png"], channels=1), int(sample["cls"])


# --8<-- [end:examples]


def main(epochs=8, replicas=None, kind="tar", folder="digit_shards"):
    """Train; returns the accuracy on a fifth of the records."""
    strategy = kmg.strategy(devices=replicas)  # Before TensorFlow starts.
    keras.utils.set_random_seed(0)
    folder = Path(folder, kind)
    write_shards(folder, kind)
    # --8<-- [start:train]
    if kind == "tar":
        samples = TarSamples(sorted(folder.glob("*.tar")))
        digits = kmg.data.from_source(samples, of_tar, version="1", global_batch_size=64)
    else:
        digits = kmg.data.from_records(folder, of_tfrecord, global_batch_size=64)
    train, validation = digits.split(0.2)
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Conv2D(32, 3, activation="relu")]
    layers += [keras.layers.Flatten(), keras.layers.Dense(10, "softmax")]
    model = kmg.distribute(keras.Sequential([keras.Input((8, 8, 1)), *layers]), strategy)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(train, validation_data=validation, epochs=epochs, verbose=2).history
    # --8<-- [end:train]
    return history["val_accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    parser.add_argument("--kind", choices=["tar", "tfrecord"], default="tar")
    main(**vars(parser.parse_args()))
