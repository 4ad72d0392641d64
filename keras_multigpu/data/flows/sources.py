"""`ImageDataGenerator` flows as sources of examples that can be read in any order."""

import abc
import copy
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.data.files.file_table import FileTable
from keras_multigpu.data.files.images import state_of
from keras_multigpu.data.flows.loading import FlowLoading
from keras_multigpu.data.flows.parameters import FlowParameters, matrices
from keras_multigpu.data.flows.targets import FlowTargets
from keras_multigpu.data.flows.transforms import change_colors, flipped, warp
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source, read_rows
from keras_multigpu.identities import identity_of, of_array

_SETTINGS = """
    rotation_range width_shift_range height_shift_range brightness_range shear_range zoom_range
    channel_shift_range fill_mode cval horizontal_flip vertical_flip rescale samplewise_center
    samplewise_std_normalization featurewise_center featurewise_std_normalization zca_whitening
    preprocessing_function mean std zca_whitening_matrix
""".split()


class FlowSource(Source):
    """Images of a flow, changed as its generator changes them."""

    def __init__(self, flow: Any, shape: tuple[int, ...], targets: FlowTargets) -> None:
        self._generator = flow.image_data_generator
        self.parameters = FlowParameters(self._generator, (shape[0], shape[1]))
        self._targets = targets
        self.num_examples = int(flow.n)
        # A function of the user's may draw, too.
        self.draws = self.parameters.draws or bool(self._generator.preprocessing_function)
        image = tf.TensorSpec(shape, flow.dtype)
        x, y, weight = targets.spec
        self.spec = ((image, *x) if x else image, image if targets.repeats_image else y, weight)
        self.labels, self.class_names = targets.labels, targets.class_names

    def still(self) -> Source:
        """As `Source.still`: standardized, and otherwise as they were loaded."""
        still = copy.copy(self)
        still.parameters = self.parameters.still()
        still.draws = bool(self._generator.preprocessing_function)
        return still

    @abc.abstractmethod
    def load(self, index: int) -> np.ndarray:
        """One image as it is before it is changed, in the size of the result."""

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        images, *rest = out
        drawn = self.parameters.draw(seeds)
        places = matrices(drawn, *images.shape[1:3])

        def read(row: int) -> None:
            parameters = {name: values[row] for name, values in drawn.items()}
            self.change(self.load(int(indices[row])), places[row], parameters, images[row])

        damaged = read_rows(len(indices), read)
        if self._targets.repeats_image:
            rest[0][...] = images
            rest = rest[1:]
        self._targets.read(rest, indices)
        return damaged

    def change(
        self, image: np.ndarray, matrix: np.ndarray, parameters: dict[str, float], out: np.ndarray
    ) -> None:
        """Fill `out` with a loaded image, changed and standardized."""
        generator = self._generator
        moved = self.moved(image, matrix, parameters, out)
        only_scaled = not self.parameters.colors and is_only_scaled(generator)
        # One pass over the pixels, from integers to scaled floats.
        if moved.dtype == np.uint8 and only_scaled:
            np.multiply(moved, np.float32(generator.rescale or 1), out=out)
            return
        changed = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        if moved is not changed:
            changed[...] = moved
        change_colors(changed, parameters)
        standardized = generator.standardize(changed)
        if standardized is not out:
            out[...] = standardized

    def moved(
        self, image: np.ndarray, matrix: np.ndarray, parameters: dict[str, float], out: np.ndarray
    ) -> np.ndarray:
        """An image with its pixels in their new places, in `out` if it has the same type."""
        if not self.parameters.moves:
            horizontal, vertical = parameters["flip_horizontal"], parameters["flip_vertical"]
            return flipped(image, bool(horizontal), bool(vertical))
        image = image.astype(np.float32, copy=False)
        result = out if out.dtype == image.dtype else np.empty(out.shape, image.dtype)
        warp(image, matrix, result, self._generator.fill_mode, self._generator.cval)
        return result

    def identity(self, exact: bool = False) -> dict[str, Any]:
        settings = {name: identity_of(getattr(self._generator, name)) for name in _SETTINGS}
        return {
            "images": self.content(exact),
            "targets": self._targets.identity(exact),
            "generator": settings,
        }

    @abc.abstractmethod
    def content(self, exact: bool) -> Any:
        """What decides the images before they are changed, as `identity`."""


def is_only_scaled(generator: Any) -> bool:
    """Whether standardization does nothing but multiply."""
    return not (
        generator.preprocessing_function
        or generator.samplewise_center
        or generator.samplewise_std_normalization
        or generator.featurewise_center
        or generator.featurewise_std_normalization
        or generator.zca_whitening
    )


class FlowFiles(FlowSource):
    """The image files of `flow_from_directory` or `flow_from_dataframe`."""

    def __init__(self, flow: Any) -> None:
        super().__init__(flow, flow.image_shape, FlowTargets.of_files(flow))
        height, width = flow.target_size
        self.name = f"a flow of image files, {height}x{width}"
        self._files = FileTable(os.path.split(path) for path in flow.filepaths)
        self._loading = FlowLoading(
            size=(int(height), int(width)),
            color_mode=flow.color_mode,
            interpolation=flow.interpolation,
            keep_aspect_ratio=flow.keep_aspect_ratio,
        )

    def load(self, index: int) -> np.ndarray:
        return self._loading.load(self._files.path(index))

    def example_name(self, index: int) -> str:
        return self._files.path(index)

    def content(self, exact: bool) -> Any:
        files = state_of(self._files, exact)
        return {"files": files, **self._loading._asdict()}


class FlowArrays(FlowSource):
    """The images of `flow(x, y)`."""

    def __init__(self, flow: Any) -> None:
        super().__init__(flow, flow.x.shape[1:], FlowTargets.of_arrays(flow))
        self.name = f"a flow of arrays, {flow.x.shape[1]}x{flow.x.shape[2]}"
        self._x = flow.x

    def load(self, index: int) -> np.ndarray:
        return self._x[index]

    def content(self, exact: bool) -> Any:
        return of_array(self._x, whole=exact)
