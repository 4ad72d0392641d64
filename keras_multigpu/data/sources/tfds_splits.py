"""The examples of a TFDS split, with random access (`array_record`) or as a stream."""

import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.pipeline.damage import Damaged, DamagedExample, is_of_machine, unread
from keras_multigpu.data.pipeline.loader import GATE, call_in_lasting_thread, read_in_pieces
from keras_multigpu.data.pipeline.source import Example, Source, Stream, present, read_rows
from keras_multigpu.data.sources.tfds_features import Features
from keras_multigpu.data.sources.tfds_preparation import import_tfds, is_generated
from keras_multigpu.data.streams.stream import buffer_shuffled, epoch_seed

# How many labels are read together.
LABELS_AT_ONCE = 1024

logger = logging.getLogger("keras_multigpu")


class TfdsRecords(Source):
    """A split with random access."""

    def __init__(self, builder: Any, split: str, features: Features) -> None:
        self.name = f"{builder.info.full_name} {split}"
        self._builder = builder
        self._split = split
        self.features = features
        self._records = builder.as_data_source(split, decoders=features.decoders)
        self.num_examples = len(self._records)
        self.spec = features.spec()
        self.class_names = features.class_names
        self.draws = features.draws

    @functools.cached_property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]
        """The class of each example, for which all records are read once."""
        key = self.features.labels_key
        if key is None:
            return None
        records = self._builder.as_data_source(self._split, decoders=self.features.only(key))
        labels = np.empty(self.num_examples, np.int64)
        logger.info("Reading the classes of %s examples of %s.", f"{len(labels):,}", self.name)
        for low in range(0, len(labels), LABELS_AT_ONCE):
            rows = list(range(low, min(low + LABELS_AT_ONCE, len(labels))))
            labels[rows] = [record[key] for record in records.__getitems__(rows)]
        return labels if labels.min(initial=0) >= 0 else None

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        try:
            records = self._records.__getitems__(indices.tolist())
        except Exception:  # One record is damaged. Reading them one by one finds which.
            records = None

        def read(row: int) -> None:
            record = self._fetch(int(indices[row])) if records is None else records[row]
            values = {name: record[name] for name in self.features.names}
            for name, decoder in self.features.images.items():
                values[name] = decoder.decode(values[name], seeds[row])
            for array, leaf in zip(out, present(self.features.example(values)), strict=True):
                # NumPy would strip zeros at the end of bytes.
                array[row] = leaf if isinstance(leaf, bytes | str) else np.asarray(leaf)

        return read_rows(len(indices), read)

    def _fetch(self, index: int) -> Any:
        try:
            return self._records[index]
        except Exception as error:
            if is_of_machine(error):
                raise unread(self.example_name(index), error) from error
            words = " ".join(str(error).split())
            raise DamagedExample(f"{type(error).__name__}: {words[:200]}") from None

    def without_draws(self) -> Source:
        same = copy.copy(self)
        same.draws, same.features = False, self.features.without_draws()
        return same if self.draws else self

    def identity(self, exact: bool = False) -> dict[str, Any]:
        place = {"folder": str(self._builder.data_path)} if exact else {}
        return {"name": self.name, **place, "features": self.features.identity()}


class TfdsStream(Stream):
    """A split without random access, read file by file."""

    names_damage = True

    def __init__(self, builder: Any, split: str, features: Features) -> None:
        self.name = f"{builder.info.full_name} {split}"
        self._builder = builder
        self._split = split
        self.features = features
        self.num_examples = builder.info.splits[split].num_examples
        self.class_names = features.class_names
        self.draws = features.draws
        features.spec()  # Raises if shapes differ.

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "features": self.features.identity()}

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

        def choose(element: dict[str, Any]) -> Any:
            name = element.get("tfds_id", element.get("image/filename", tf.constant("")))
            return {key: element[key] for key in self.features.names}, name

        dataset = dataset.map(choose)
        return buffer_shuffled(dataset, epoch, seed) if shuffle else dataset

    def without_draws(self) -> Stream:
        same = copy.copy(self)
        same.draws, same.features = False, self.features.without_draws()
        return same if self.draws else self

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
