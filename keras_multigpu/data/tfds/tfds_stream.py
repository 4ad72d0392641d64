"""The examples of a TFDS split without random access."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.loader import GATE, call_in_lasting_thread, read_in_pieces
from keras_multigpu.data.pipeline.source import Example, Stream, read_rows
from keras_multigpu.data.streams.shuffling import buffer_shuffled, epoch_seed
from keras_multigpu.data.tfds.features import Features
from keras_multigpu.data.tfds.preparation import import_tfds, is_generated


class TfdsStream(Stream):
    """The examples of a TFDS split without random access, file by file."""

    names_damage = True

    def __init__(self, builder: Any, split: str, features: Features, shuffle_buffer: int) -> None:
        self.name = f"{builder.info.full_name} {split}"
        self._builder = builder
        self._split = split
        self.features = features
        self._buffer = shuffle_buffer
        self.num_examples = builder.info.splits[split].num_examples
        self.class_names = features.class_names
        self.draws = features.draws
        features.spec()  # Raises if shapes differ.

    def identity(self) -> dict[str, Any]:
        features = self.features.identity()
        return {**super().identity(), "features": features, "shuffle_buffer": self._buffer}

    def examples(self, epoch: tf.Tensor, shuffle: bool, seed: int) -> tf.data.Dataset:
        """As `Stream.examples`: the features, and the name of each example."""
        if shuffle:
            # The program's own seed must not affect the shuffle of files.
            tf.random.set_seed(1)
        # Without `try_autocache`, since `cache` decides what stays in memory.
        config = import_tfds().ReadConfig(
            shuffle_seed=epoch_seed(seed, epoch) if shuffle else None,
            add_tfds_id=True,
            try_autocache=False,
        )
        dataset = self._builder.as_dataset(
            split=self._split,
            # A builder without its own files would shuffle every epoch in the same order.
            shuffle_files=shuffle and is_generated(self._builder),
            read_config=config,
            decoders=self.features.decoders,
        )

        def chosen(element: dict[str, Any]) -> Any:
            name = element.get("tfds_id", element.get("image/filename", tf.constant("")))
            return {key: element[key] for key in self.features.names}, name

        dataset = dataset.map(chosen)
        return buffer_shuffled(dataset, self._buffer, epoch, seed) if shuffle else dataset

    def still(self) -> Stream:
        still = copy.copy(self)
        still.draws, still.features = False, self.features.still()
        return still if self.draws else self

    def finish(self, examples: Any, seeds: tf.Tensor) -> tuple[Example, tf.Tensor | None]:
        values, names = examples
        values = dict(values)
        damage = None
        for key, decoder in self.features.images.items():
            values[key], causes = decode_batch(decoder, values[key], seeds, names)
            pairs = tf.stack([names, causes], axis=1)
            damage = pairs if damage is None else tf.where(damage[:, 1:] == "", pairs, damage)
        return self.features.example(values), damage


def decode_batch(
    decoder: ImageDecoder, images: tf.Tensor, seeds: tf.Tensor, names: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Decoded images, and the cause of damage for each, empty if it is intact."""

    def decode(images: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        def read(out: Sequence[np.ndarray], rows: np.ndarray, seeds: np.ndarray) -> Damaged:
            def one(row: int) -> None:
                out[0][row] = decoder.decode(images[rows[row]], seeds[row])

            return read_rows(len(rows), one)

        with GATE:
            out = np.zeros((len(images), *decoder.shape), np.uint8)
            causes = np.full(len(images), b"", object)
            rows = np.arange(len(images))
            for row, cause in call_in_lasting_thread(read_in_pieces, read, [out], rows, seeds):
                causes[row] = cause.encode()
            return out, causes

    pixels, causes = tf.numpy_function(decode, [images, seeds], [tf.uint8, tf.string])
    pixels.set_shape([None, *decoder.shape])
    causes.set_shape([None])
    return pixels, causes
