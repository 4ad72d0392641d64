"""The peers of bench_data.py: other readers of a folder of photographs in batches.

Each function gets the folder's files and returns a `Reader`: called with the number of a round
it gives that round's batches. A peer that is not installed raises ImportError.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

Reader = Callable[[int], Iterable]

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SIZE = (224, 224)
BATCH = 32


def keras_directory(files: list[Path]) -> Reader:
    """Keras's `image_dataset_from_directory`, as its guide uses it."""
    import keras

    dataset = keras.utils.image_dataset_from_directory(
        files[0].parents[1], image_size=SIZE, batch_size=BATCH, verbose=False
    )
    return lambda number: dataset


def decoding(files: list[Path]) -> Reader:
    """TensorFlow reading and decoding the files, without resizing or batching them."""
    import tensorflow as tf

    def decode(path: tf.Tensor) -> tf.Tensor:
        # Each image counts as a batch of one.
        return tf.io.decode_jpeg(tf.io.read_file(path), 3)[None]

    dataset = tf.data.Dataset.from_tensor_slices([str(file) for file in files])
    dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return lambda number: dataset


def pillow_image(file: Path) -> np.ndarray:
    """An image as torchvision's datasets load and resize it."""
    from PIL import Image

    with Image.open(file) as image:
        return np.array(image.convert("RGB").resize(SIZE, Image.Resampling.BILINEAR))


def opencv_image(file: Path) -> np.ndarray:
    import cv2

    image = cv2.imdecode(np.fromfile(file, np.uint8), cv2.IMREAD_COLOR_RGB)
    return cv2.resize(image, SIZE, interpolation=cv2.INTER_LINEAR)


def in_threads(files: list[Path], load: Callable[[Path], np.ndarray]) -> Iterator[np.ndarray]:
    """Batches read by one thread for each core, two batches ahead."""
    ahead: deque = deque()
    with ThreadPoolExecutor(CORES) as pool:
        for start in range(0, len(files), BATCH):
            ahead.append([pool.submit(load, file) for file in files[start : start + BATCH]])
            if len(ahead) > 2:
                yield np.stack([image.result() for image in ahead.popleft()])
        for images in ahead:
            yield np.stack([image.result() for image in images])


def pillow(files: list[Path]) -> Reader:
    import PIL

    assert PIL
    return lambda number: in_threads(files, pillow_image)


def opencv(files: list[Path]) -> Reader:
    import cv2

    assert cv2
    return lambda number: in_threads(files, opencv_image)


def grain(files: list[Path]) -> Reader:
    """Grain's threads, with OpenCV as the decoder."""
    import grain

    images = grain.MapDataset.source(files).shuffle(seed=0).map(opencv_image)
    options = grain.ReadOptions(num_threads=CORES, prefetch_buffer_size=3 * BATCH)
    dataset = images.to_iter_dataset(options).batch(BATCH)
    return lambda number: dataset


def torch(files: list[Path]) -> Reader:
    """PyTorch's DataLoader with a process for each core, and Pillow as its users decode."""
    from torch.utils.data import DataLoader

    # Fresh processes, kept for all rounds: TensorFlow's threads do not survive a fork.
    loader = DataLoader(
        PillowImages(files),
        batch_size=BATCH,
        shuffle=True,
        num_workers=CORES,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    return lambda number: loader


class PillowImages:
    """A map-style dataset for PyTorch."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> np.ndarray:
        return pillow_image(self.files[index])


PEERS = {
    "image_dataset_from_directory": keras_directory,
    "TensorFlow, decoding only": decoding,
    "Pillow, threads": pillow,
    "OpenCV, threads": opencv,
    "grain with OpenCV, threads": grain,
    "PyTorch DataLoader with Pillow, processes": torch,
}
