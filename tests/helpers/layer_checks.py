"""What every augmentation layer promises; a layer's own tests look at its pixels."""

import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Everything that `RandomColor` draws, and what `RandomGeometry` draws for images of any size.
COLOR = {
    "brightness": 0.3,
    "contrast": (0.5, 0.8),
    "saturation": (0.2, 0.9),
    "hue": 0.5,
    "grayscale": 0.3,
}
GEOMETRY = {
    "flip": "horizontal_and_vertical",
    "rotation": 0.2,
    "translation": 0.1,
    "zoom": (0.2, 0.1),
    "shear": 0.2,
}
SHAPES = ((4, 12, 10, 3), (3, 9, 7, 1), (2, 8, 11, 4), (1, 5, 3, 3), (0, 8, 8, 3))
"""RGB, odd sizes in grayscale, RGBA, a batch of one, an empty batch."""


def pictures(shape: tuple[int, ...], value_range: Any = (0, 255), seed: int = 0) -> np.ndarray:
    """Float images of random pixels, with nothing beyond the range of values."""
    low, high = value_range
    values = np.random.default_rng(seed).uniform(low, high, shape)
    return values.astype("float32")


def seeds_for(count: int, seed: int = 7) -> tf.Tensor:
    """Two seeds for each of `count` images."""
    limits = np.iinfo("int32")
    values = np.random.default_rng(seed).integers(limits.min, limits.max, (count, 2))
    return tf.constant(values, tf.int32)


def drawn_for(layer: Any, shape: tuple[int, ...], seed: int = 7) -> Any:
    """What a layer draws for a batch of images of a shape."""
    return layer.draw(seeds_for(shape[0], seed), shape[1:])


def check_layer(
    layer: Any, value_range: Any = (0, 255), shapes: Any = SHAPES[:1], *, labels: bool = False
) -> None:
    """Check everything that a layer promises and that needs no graph.

    Args:
        layer: The layer.
        value_range: The values of black and white that it expects.
        shapes: Shapes of batches of images.
        labels: Whether it needs labels beside the images.
    """
    check_config(layer)
    for shape in shapes:
        data = with_labels(pictures(shape, value_range), labels)
        check_inference(layer, data)
        check_shapes(layer, data)
    check_draws(layer, shapes[0])
    data = with_labels(pictures(shapes[0], value_range), labels)
    check_dtypes(layer, data, value_range)
    check_replays(layer, data)
    if not labels:
        check_one_image(layer, data)


def check_graphs(layer: Any, host_tolerance: float, labels: bool = False) -> None:
    """Check that pipelines, models and XLA give the same pixels, for images of 0 to 255.

    Args:
        layer: The layer.
        host_tolerance: How far host and model may be apart, as a part of the range of values.
        labels: Whether it needs labels beside the images.
    """
    for shape in SHAPES[:1] if labels else SHAPES:
        data = with_labels(pictures(shape), labels)
        check_host_and_model_agree(layer, data, 255 * host_tolerance)
    data = with_labels(pictures(SHAPES[0]), labels)
    check_unknown_shapes(layer, data)
    check_xla(layer, data)


def with_labels(images: np.ndarray, labels: bool) -> Any:
    """Images alone, or with labels in one of three classes."""
    if not labels:
        return images
    return {"images": images, "labels": np.eye(3, dtype="float32")[np.arange(len(images)) % 3]}


def images_of(data: Any) -> Any:
    return data["images"] if isinstance(data, dict) else data


def again(layer: Any, **changes: Any) -> Any:
    """The layer made again from its configuration, with other arguments."""
    return type(layer).from_config({**layer.get_config(), **changes})


def check_config(layer: Any) -> None:
    """A layer made from another's configuration has the same configuration, through JSON, too."""
    assert again(layer).get_config() == layer.get_config()
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(copy) is type(layer)
    assert copy.get_config() == layer.get_config()


def check_inference(layer: Any, data: Any) -> None:
    """Nothing changes at inference where the layer keeps the shape of images."""
    images = images_of(data)
    if layer.changed_shape(images.shape[1:]) == images.shape[1:]:
        np.testing.assert_array_equal(images_of(layer(data, training=False)), images)


def check_shapes(layer: Any, data: Any) -> None:
    """A batch keeps its number of images, and they have the shape that the layer promises."""
    images = images_of(data)
    result = images_of(layer(data))
    assert tuple(result.shape) == (len(images), *layer.changed_shape(images.shape[1:]))
    assert np.isfinite(result).all()


def check_draws(layer: Any, shape: tuple[int, ...]) -> None:
    """An image's draws depend on its own seeds alone, whatever else is in the batch."""
    seeds = seeds_for(shape[0])
    together = layer.draw(seeds, shape[1:])
    parts = [layer.draw(part, shape[1:]) for part in (seeds[:1], seeds[1:])]
    tf.nest.map_structure(
        lambda whole, *some: np.testing.assert_allclose(whole, tf.concat(some, 0), rtol=1e-6),
        together,
        *parts,
    )


def check_host_and_model_agree(layer: Any, data: Any, tolerance: float) -> None:
    """The same draws give the same pixels in a pipeline and in a model."""
    drawn = drawn_for(layer, images_of(data).shape)

    # In a graph, as in a pipeline, where parts of it are compiled.
    @tf.function(autograph=False)
    def in_a_pipeline() -> Any:
        return images_of(layer.apply(data, drawn, on_host=True))

    on_host = in_a_pipeline()
    in_model = images_of(layer.apply(data, drawn, on_host=False))
    np.testing.assert_allclose(on_host, in_model, rtol=0, atol=tolerance)


def check_dtypes(layer: Any, data: Any, value_range: Any) -> None:
    """Images come in any dtype and leave in the layer's; half precision loses nothing more."""
    images = images_of(data)
    drawn = drawn_for(layer, images.shape)

    def result(images: Any, **changes: Any) -> Any:
        batch = {**data, "images": images} if isinstance(data, dict) else images
        return images_of(again(layer, **changes).apply(batch, drawn))

    expected = result(images).numpy()
    assert expected.dtype == "float32"
    half = result(images, dtype="mixed_float16")
    assert half.dtype == tf.float16
    np.testing.assert_allclose(half, expected, rtol=1e-3, atol=1e-3)
    if tuple(value_range) == (0, 255):
        whole = np.round(images)
        expected = result(whole).numpy()
        np.testing.assert_array_equal(result(whole.astype("uint8")), expected)
        bytes_out = result(whole.astype("uint8"), dtype="uint8")
        assert bytes_out.dtype == tf.uint8
        np.testing.assert_array_equal(bytes_out, np.round(expected).clip(0, 255))


def check_replays(layer: Any, data: Any) -> None:
    """The same seed gives the same images, and the next call gives others."""
    first, second = again(layer, seed=5), again(layer, seed=5)
    np.testing.assert_array_equal(images_of(first(data)), images_of(second(data)))
    call = images_of(first(data)).numpy()
    assert any((images_of(first(data)).numpy() != call).any() for _ in range(7))


def check_one_image(layer: Any, images: np.ndarray) -> None:
    """One image without the batch axis is changed as a batch of one."""
    drawn = drawn_for(layer, images[:1].shape)
    alone = layer.apply(images[0], drawn)
    np.testing.assert_allclose(alone, layer.apply(images[:1], drawn)[0], rtol=0, atol=1e-3)


def check_unknown_shapes(layer: Any, data: Any) -> None:
    """A pipeline with unknown shapes gives what a call with known shapes gives."""
    images = images_of(data)
    seeds = seeds_for(len(images))
    labels = data["labels"] if isinstance(data, dict) else None

    def augmented(images: Any, seeds: Any, labels: Any = None) -> Any:
        return layer.augment_batch(images, labels, None, seeds, training=True)[0]

    parts = (images, seeds) if labels is None else (images, seeds, labels)
    signature = (
        tf.TensorSpec((None, None, None, images.shape[-1]), tf.float32),
        tf.TensorSpec((None, 2), tf.int32),
        tf.TensorSpec((None, 3), tf.float32),
    )
    stream = tf.data.Dataset.from_generator(
        lambda: [parts], output_signature=signature[: len(parts)]
    )
    (result,) = list(stream.map(augmented))
    expected = layer.augment_batch(
        tf.constant(images), None if labels is None else tf.constant(labels), None, seeds, True
    )[0]
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3)


def check_xla(layer: Any, data: Any) -> None:
    """XLA compiles the layer, and the pixels stay the same."""
    seeds = seeds_for(len(images_of(data)))

    def augmented(data: Any) -> Any:
        drawn = layer.draw(seeds, images_of(data).shape[1:])
        return images_of(layer.apply(data, drawn))

    compiled = tf.function(augmented, jit_compile=True)
    data = tf.nest.map_structure(tf.constant, data)
    np.testing.assert_allclose(compiled(data), augmented(data), rtol=1e-4, atol=1e-2)


def check_saved_model(layer: Any, path: Any, shape: tuple[int, ...] = (8, 8, 3)) -> None:
    """A functional model with the layer is saved and loaded, and predicts the same.

    Args:
        layer: A layer that keeps the shape of images.
        path: A folder for the file.
        shape: The shape of one image.
    """
    inputs = keras.Input(shape)
    model = keras.Model(inputs, keras.layers.Flatten()(layer(inputs)))
    model.save(path / "model.keras")
    loaded = keras.saving.load_model(path / "model.keras")
    (copy,) = [one for one in loaded.layers if type(one) is type(layer)]
    # JSON has lists only.
    assert json.dumps(copy.get_config()) == json.dumps(layer.get_config())
    images = pictures((2, *shape))
    np.testing.assert_array_equal(loaded(images), model(images))
    assert (model(images, training=True).numpy() != model(images).numpy()).any()
