"""Masks next to real images."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.small_image_files import numbers_and_more, write_csv, write_numbers

from keras_multigpu.data import from_files

SMALL = {"image_size": (4, 4), "global_batch_size": 4, "task": "mask"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_numbers(tmp_path_factory.mktemp("files"))


def unshuffled(*arguments, **keywords):
    batches = from_files(*arguments, **{**SMALL, "shuffle": False, **keywords})
    return batches, numbers_and_more(batches.epoch(0))


def write_mask(path, numbers):
    path.write_bytes(tf.io.encode_png(np.asarray(numbers, np.uint8)[..., None]).numpy())
    return path


def test_masks_are_never_interpolated(folder, tmp_path):
    numbers = np.kron([[0, 200], [9, 3]], np.ones((8, 8)))
    mask = write_mask(tmp_path / "mask.png", numbers)
    batches, (_, masks) = unshuffled([folder / "00.png"], [mask], image_size=(6, 6))
    assert (masks.dtype, masks.shape) == (np.uint8, (1, 6, 6, 1))
    np.testing.assert_array_equal(masks[0, ..., 0], np.kron([[0, 200], [9, 3]], np.ones((3, 3))))
    assert batches.class_names is None
    assert unshuffled([folder / "00.png"], [mask])[1][1].shape == (1, 4, 4, 1)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_masks_with_a_palette_give_its_indices(folder, tmp_path, bits):
    """As Pascal VOC and many tools store masks; decoded as images, they would turn grey."""
    image = pytest.importorskip("PIL.Image")
    numbers = np.arange(16, dtype=np.uint8).reshape(4, 4) % min(2**bits, 16)
    picture = image.fromarray(numbers, "L").convert("P")
    picture.putdata(numbers.ravel().tolist())
    picture.putpalette([value for n in range(2**bits) for value in (255 - n, 7 * n % 256, n)])
    picture.save(tmp_path / "mask.png", bits=bits)
    _, (_, masks) = unshuffled([folder / "00.png"], [tmp_path / "mask.png"])
    np.testing.assert_array_equal(masks[0, ..., 0], numbers)


def test_masks_with_equal_channels_are_read_and_colours_are_refused(folder, tmp_path):
    grey = np.repeat(np.array([[0, 7], [255, 1]], np.uint8)[..., None], 3, axis=2)
    (tmp_path / "grey.png").write_bytes(tf.io.encode_png(grey).numpy())
    (tmp_path / "colour.png").write_bytes(tf.io.encode_png(grey + np.uint8([0, 0, 9])).numpy())
    deep = tf.io.encode_png(np.full((2, 2, 1), 300, np.uint16)).numpy()
    (tmp_path / "deep.png").write_bytes(deep)
    images = [folder / "00.png"] * 3
    masks = [tmp_path / f"{name}.png" for name in ("grey", "colour", "deep")]
    batches = from_files(images, masks, task="mask", image_size=2, on_error="skip", shuffle=False)
    with pytest.warns(UserWarning, match="damaged"):
        (_, found), *_ = batches.epoch(0)
    np.testing.assert_array_equal(found[..., 0], [[[0, 7], [255, 1]]])
    # Both are listed under their image, which they share.
    assert "its mask" in batches.quarantine[0].cause
    for mask, cause in zip(masks[1:], ("it has colours", "it has 16 bits"), strict=True):
        with pytest.raises(tf.errors.OpError, match=f"00.png cannot be read: its mask .*{cause}"):
            list(from_files(images[:1], [mask], task="mask", image_size=2).epoch(0))


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("size", [(48, 48), (16, 24)])
def test_a_random_crop_cuts_an_image_and_its_mask_alike(tmp_path, suffix, size):
    """Image and mask have the same values everywhere, in every epoch."""
    numbers = (np.arange(64)[:, None] // 8 * 8 + np.arange(48) // 6) * 3
    picture = np.repeat(numbers[..., None].astype(np.uint8), 3, axis=2)
    encode = tf.io.encode_png(picture)
    if suffix == "jpg":
        encode = tf.io.encode_jpeg(picture, quality=100, chroma_downsampling=False)
    (tmp_path / f"image.{suffix}").write_bytes(encode.numpy())
    mask = write_mask(tmp_path / "mask.png", numbers)
    batches = from_files(
        [tmp_path / f"image.{suffix}"],
        [mask],
        task="mask",
        image_size=size,
        resize="random_crop",
        interpolation="nearest",
        global_batch_size=1,
    )
    seen = []
    for epoch in range(6):
        (images, masks), *_ = batches.epoch(epoch)
        difference = images.numpy().astype(int) - masks.numpy().astype(int)
        assert np.abs(difference).max() <= (0 if suffix == "png" else 4)
        seen.append(masks.numpy().tobytes())
    assert len(set(seen)) == 6


def test_a_random_crop_needs_masks_of_their_images_size(folder, tmp_path):
    mask = write_mask(tmp_path / "mask.png", np.zeros((4, 5)))
    settings = {"task": "mask", "image_size": 4, "resize": "random_crop"}
    batches = from_files([folder / "00.png"], [mask], **settings)
    message = "its mask .* has 5 x 4 pixels and its image 4 x 4"
    with pytest.raises(tf.errors.OpError, match=message):
        list(batches.epoch(0))


def test_masks_of_a_table_are_relative_to_it(folder, tmp_path):
    (tmp_path / "image.png").write_bytes((folder / "05.png").read_bytes())
    write_mask(tmp_path / "mask.png", np.full((4, 4), 5))
    table = write_csv(tmp_path / "table.csv", ["path", "label"], [["image.png", "mask.png"]])
    _, (images, masks) = unshuffled(table)
    assert images == [5]
    assert masks.max() == masks.min() == 5
