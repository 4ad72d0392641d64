"""The records of a TFDS split with random access (`array_record`)."""

import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_multigpu.data.pipeline.damage import Damaged, DamagedExample
from keras_multigpu.data.pipeline.source import Source, present, read_rows
from keras_multigpu.data.tfds.features import Features

LABELS_AT_ONCE = 1024

logger = logging.getLogger("keras_multigpu")


class TfdsRecords(Source):
    """The examples of a TFDS split with random access."""

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
            record = self._fetched(int(indices[row])) if records is None else records[row]
            values = {name: record[name] for name in self.features.names}
            for name, decoder in self.features.images.items():
                values[name] = decoder.decode(values[name], seeds[row])
            for array, leaf in zip(out, present(self.features.example(values)), strict=True):
                # NumPy would strip zeros at the end of bytes.
                array[row] = leaf if isinstance(leaf, bytes | str) else np.asarray(leaf)

        return read_rows(len(indices), read)

    def _fetched(self, index: int) -> Any:
        try:
            return self._records[index]
        except Exception as error:
            words = " ".join(str(error).split())
            raise DamagedExample(f"{type(error).__name__}: {words[:200]}") from None

    def still(self) -> Source:
        still = copy.copy(self)
        still.draws, still.features = False, self.features.still()
        return still if self.draws else self

    def identity(self, exact: bool = False) -> dict[str, Any]:
        place = {"folder": str(self._builder.data_path)} if exact else {}
        return {"name": self.name, **place, "features": self.features.identity()}
