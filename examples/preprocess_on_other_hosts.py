"""Let other hosts read and decode the files of a training, by TensorFlow's tf.data service.

    python examples/preprocess_on_other_hosts.py                              # all on this machine
    python examples/preprocess_on_other_hosts.py --dispatch 5050              # or: on one host,
    python examples/preprocess_on_other_hosts.py --work host:5050             # on many others,
    python examples/preprocess_on_other_hosts.py --service grpc://host:5050   # and here

The digits are those of scikit-learn: pip install scikit-learn pillow
"""

import argparse
import tempfile
from pathlib import Path

import keras
import tensorflow as tf

import keras_multigpu as kmg


def write_digits(folder):
    """Handwritten digits as files; their names, and which digit each shows."""
    from PIL import Image
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    files = [str(Path(folder, f"{number}.png")) for number in range(len(images))]
    for file, image in zip(files, images, strict=True):
        Image.fromarray((image.reshape(8, 8) * 15).astype("uint8")).save(file)
    return files, labels


# --8<-- [start:dataset]
def read(file, label):
    """What other hosts do with each file: TensorFlow's functions, and no Python."""
    image = tf.io.decode_png(tf.io.read_file(file), channels=1)
    image.set_shape([8, 8, 1])
    return tf.image.resize(tf.cast(image, tf.float32) / 255, [16, 16]), label


def batches(files, labels, service):
    """The same batches in the same order, whoever has made the images."""
    dataset = tf.data.Dataset.from_tensor_slices((files, labels)).map(read)
    return kmg.data.from_dataset(
        dataset, global_batch_size=64, shuffle_buffer=2048, service=service
    )


# --8<-- [end:dataset]


# --8<-- [start:hosts]
def dispatch(port=0):
    """What runs on one host: it knows who works."""
    config = tf.data.experimental.service.DispatcherConfig(port=port)
    return tf.data.experimental.service.DispatchServer(config)


def work(dispatcher):
    """What runs on the others: `dispatcher` is `host:port`, and others reach this host by name."""
    config = tf.data.experimental.service.WorkerConfig(dispatcher)
    return tf.data.experimental.service.WorkerServer(config)


# --8<-- [end:hosts]


def main(epochs=5, replicas=2, service=None):
    """Train; returns the accuracy of the last epoch."""
    kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(1)
    hosts = []
    if service is None:
        hosts = [dispatch()]
        service = hosts[0].target
        hosts += [work(service.rpartition("/")[2]) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        data = batches(*write_digits(folder), service)
        layers = [keras.layers.Flatten(), keras.layers.Dense(10, "softmax")]
        model = kmg.distribute(keras.Sequential([keras.Input((16, 16, 1)), *layers]))
        model.compile(
            keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        history = model.fit(data, epochs=epochs, verbose=2)
    return history.history["accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dispatch", type=int, metavar="PORT")
    parser.add_argument("--work", metavar="HOST:PORT")
    parser.add_argument("--service", metavar="grpc://HOST:PORT")
    arguments = parser.parse_args()
    if arguments.dispatch is not None:
        dispatch(arguments.dispatch).join()
    elif arguments.work:
        work(arguments.work).join()
    else:
        main(service=arguments.service)
