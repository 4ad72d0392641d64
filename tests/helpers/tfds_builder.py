"""Small TFDS builders, in a module of their own because TFDS has to import it."""

import io
import os
import time
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds  # noqa: TID253 (the classes need it at once)

DAMAGED = 5


class Spots(tfds.core.GeneratorBasedBuilder):
    """Example i: an image of one colour, i, of the class `i % 3`."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 6, 3), encoding_format="png"),
                    "label": tfds.features.ClassLabel(names=["ant", "bee", "cow"]),
                    "number": np.int64,
                    "text": tfds.features.Text(),
                    "weight": np.float32,
                    "box": {"corner": tfds.features.Tensor(shape=(2,), dtype=np.float32)},
                    "words": tfds.features.Sequence(np.int64),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0, 23), "test": self._generate_examples(23, 30)}

    def _generate_examples(self, low, high):
        noted = os.environ.get("TFDS_BUILDER_NOTES")
        if noted:
            with Path(noted).open("a") as file:
                file.write("generated\n")
            time.sleep(0.3)
        for number in range(low, high):
            yield (
                number,
                {
                    "image": np.full((8, 6, 3), number, np.uint8),
                    "label": number % 3,
                    "number": number,
                    "text": f"text {number}",
                    "weight": number / 2,
                    "box": {"corner": [number, 1]},
                    "words": list(range(number)),
                },
            )


class Photos(tfds.core.GeneratorBasedBuilder):
    """JPEGs of several sizes, of which number 5 is truncated; there are no supervised keys."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {"image": tfds.features.Image(), "number": np.int64}
            ),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        from PIL import Image

        for number in range(9):
            file = io.BytesIO()
            pixels = np.random.default_rng(number).integers(
                0, 255, (20 + number, 30 - number, 3), np.uint8
            )
            Image.fromarray(pixels).save(file, "JPEG")
            content = file.getvalue()
            content = content[: len(content) // 3] if number == DAMAGED else content
            yield number, {"image": io.BytesIO(content), "number": number}
