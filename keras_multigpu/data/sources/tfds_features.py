"""The features of a TFDS data set that become inputs and targets, and their decoders."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.data.decoding.decoder import CHANNELS, ImageDecoder
from keras_multigpu.data.pipeline.source import Example
from keras_multigpu.data.sources.tfds_preparation import import_tfds

COLOR_MODES = {count: mode for mode, count in CHANNELS.items()}


class Features:
    """The features to read; the arguments are those of `from_tfds`.

    Attributes:
        keys: `(x, y, sample_weight)` as feature names.
        names: All feature names in `keys`.
        images: The decoders of the images that are decoded here.
        decoders: TFDS decoders that leave these images, and unused ones, encoded.
    """

    def __init__(
        self,
        info: Any,
        chosen: Any,
        image_size: Any,
        color_mode: str | None,
        **decoding: Any,
    ) -> None:
        if isinstance(image_size, Mapping):
            raise value_error(
                "`image_size` changes with the epoch.",
                "Expected one size: `from_directory` and `from_files` change theirs.",
                image_size=image_size,
            )
        self._connectors = dict(info.features.items())
        self.keys = choose_keys(info, chosen)
        self.names = [name for name in keras.tree.flatten(self.keys) if name is not None]
        for name in self.names:
            if name not in self._connectors:
                raise value_error(
                    "There is no such feature.",
                    f"Expected one of {', '.join(self._connectors)}.",
                    feature=name,
                )
        self.images = {
            name: ImageDecoder(
                image_size or connector.shape[:2],
                color_mode=color_mode or COLOR_MODES.get(connector.shape[2], "rgb"),
                **decoding,
            )
            for name, connector in self._connectors.items()
            if name in self.names
            and is_plain_image(connector)
            and (image_size is not None or None not in connector.shape)
        }
        if (image_size is not None or decoding["resize"] == "random_crop") and not self.images:
            raise value_error(
                f"{info.name} has no image to be resized.",
                f"Expected an 8-bit image among {self.names}.",
                "Leave out `image_size` and `resize`, or choose other `features`.",
                image_size=image_size,
            )
        # Decoding here names damaged images, and decodes none that a resumed run skips.
        unread = {name for name in self._connectors if name not in self.names}
        self.decoders = self._skipping(unread | self.images.keys())

    def _skipping(self, names: set[str]) -> dict[str, Any]:
        """Decoders that leave images encoded; `PartialDecoding` has no random access."""
        tfds = import_tfds()
        return {
            name: tfds.decode.SkipDecoding()
            for name in names
            if isinstance(self._connectors[name], tfds.features.Image)
        }

    @property
    def draws(self) -> bool:
        return any(decoder.draws for decoder in self.images.values())

    def without_draws(self) -> Self:
        same = copy.copy(self)
        same.images = {name: decoder.without_draws() for name, decoder in self.images.items()}
        return same

    def spec(self) -> Example:
        specs = {}
        for name in self.names:
            connector = self._connectors[name]
            specs[name] = keras.tree.map_structure(
                lambda part: tf.TensorSpec(part.shape, part.tf_dtype), connector.get_tensor_info()
            )
            if name in self.images:
                specs[name] = tf.TensorSpec(self.images[name].shape, tf.uint8)
            for leaf in keras.tree.flatten(specs[name]):
                if not leaf.shape.is_fully_defined():
                    raise value_error(
                        f"The shape of the feature {name!r} differs from example to example.",
                        "Expected one shape, so that examples can be batched.",
                        "Pass image_size=(224, 224) or another size."
                        if is_plain_image(connector)
                        else "Choose other `features`.",
                        shape=leaf.shape,
                    )
        return self.example(specs)

    def example(self, values: dict[str, Any]) -> Example:
        return fill_in(self.keys, values)

    @property
    def labels_key(self) -> str | None:
        """The feature with the class of each example, if there is one."""
        _, y, _ = self.keys
        is_class = isinstance(y, str) and isinstance(
            self._connectors[y], import_tfds().features.ClassLabel
        )
        return y if is_class else None

    @property
    def class_names(self) -> list[str] | None:
        key = self.labels_key
        return None if key is None else list(self._connectors[key].names)

    def only(self, key: str) -> dict[str, Any]:
        """Decoders that leave all images but this feature encoded."""
        return self._skipping(self._connectors.keys() - {key})

    def identity(self) -> dict[str, Any]:
        images = {name: decoder.settings for name, decoder in self.images.items()}
        return {"keys": self.keys, "images": images}


def fill_in(keys: Any, values: dict[str, Any]) -> Any:
    """A structure of names with each name replaced by its value."""
    if isinstance(keys, dict):
        return {name: fill_in(key, values) for name, key in keys.items()}
    if isinstance(keys, tuple | list):
        return tuple(fill_in(key, values) for key in keys)
    return None if keys is None else values[keys]


def choose_keys(info: Any, chosen: Any) -> Any:
    """`(x, y, sample_weight)` as names of features."""
    if chosen is not None:
        if not isinstance(chosen, tuple | list) or not 1 <= len(chosen) <= 3:
            raise value_error(
                "`features` does not say which are inputs and which are targets.",
                "Expected (x, y) or (x, y, sample_weight), as names of features.",
                'Pass for example features=("image", "label").',
                features=chosen,
            )
        return (*chosen, None, None)[:3]
    if not info.supervised_keys:
        raise value_error(
            f"{info.name} does not say which features are inputs and which are targets.",
            f"Expected a choice among {', '.join(info.features)}.",
            "Pass features=(x, y).",
            features=chosen,
        )
    return (*info.supervised_keys, None)[:3]


def is_plain_image(connector: Any) -> bool:
    """Whether a feature is an ordinary 8-bit picture, and no mask."""
    return (
        type(connector) is import_tfds().features.Image
        and np.dtype(connector.np_dtype) == np.uint8
        and connector.shape[2] in (None, *COLOR_MODES)
    )
