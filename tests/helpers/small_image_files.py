"""Small image files of one colour each, and what datasets read from them."""

import csv

import numpy as np
import tensorflow as tf


def write_image(path, number, encode=tf.io.encode_png):
    """Write a small image in a colour of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    color = np.array([number, 255 - number, number * 7 % 256], np.uint8)
    path.write_bytes(encode(np.broadcast_to(color, (4, 4, 3))).numpy())


def write_images(folder, names):
    for number, name in enumerate(names):
        write_image(folder / name, number)


def content(dataset):
    """All images, rounded, and all labels of a dataset of batches."""
    batches = [batch if isinstance(batch, tuple) else (batch,) for batch in dataset]
    parts = [
        np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*batches, strict=True)
    ]
    return [np.rint(parts[0]).astype(np.uint8), *parts[1:]]


def write_two_classes(folder):
    """20 cats and 10 dogs; image n has n in its first channel."""
    write_images(folder, [f"{'cat' if i < 20 else 'dog'}/{i:02}.png" for i in range(30)])
    return folder


def write_numbers(folder):
    """Twelve images; image n has n in all channels."""
    for number in range(12):
        image = np.full((4, 4, 3), number, np.uint8)
        (folder / f"{number:02}.png").write_bytes(tf.io.encode_png(image).numpy())
    return folder


def numbers_and_more(dataset):
    """The numbers of the images of `write_numbers`, and all other parts of a dataset."""
    images, *others = content(dataset)
    return [images[:, 0, 0, 0].tolist(), *others]


def write_csv(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path
