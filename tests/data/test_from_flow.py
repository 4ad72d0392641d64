"""`from_flow`: flows of `ImageDataGenerator` as `Batches`."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.data.from_flow import from_flow
from keras_multigpu.data.pipeline.source import Source, Stream
from keras_multigpu.data.sources.flows import UNMOVED

pytest.importorskip("cv2")
Generator = tf.keras.preprocessing.image.ImageDataGenerator  # noqa: TID251


# Keras 3.15 calls SciPy's `affine_transform` by a name that SciPy is going to remove.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Please import `affine_transform` from the `scipy.ndimage`:DeprecationWarning"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten images of one color each, 7 cats and 3 dogs; the red channel identifies them."""
    from PIL import Image

    path = tmp_path_factory.mktemp("photos")
    for number in range(10):
        kind = "cats" if number < 7 else "dogs"
        (path / kind).mkdir(exist_ok=True)
        image = np.full((20, 30, 3), (10 * number, 100, 200), np.uint8)
        suffix = "png" if number % 2 else "jpg"
        Image.fromarray(image).save(path / kind / f"{number}.{suffix}", quality=100)
    return path


def of_folder(folder, **arguments):
    generator = Generator(**arguments.pop("generator", {}))
    return generator.flow_from_directory(
        folder, **{"target_size": (12, 16), "batch_size": 4, **arguments}
    )


def joined(batches, epoch=0):
    parts = list(batches.epoch(epoch).as_numpy_iterator())
    return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)


def of_generator(flow):
    parts = [flow[number] for number in range(len(flow))]
    parts = keras.tree.lists_to_tuples(parts)
    return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)


def assert_same(actual, wanted):
    keras.tree.assert_same_structure(actual, wanted)
    for one, other in zip(keras.tree.flatten(actual), keras.tree.flatten(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


# Flows of files.


@pytest.mark.parametrize(
    ("class_mode", "color_mode"),
    [
        ("categorical", "rgb"),
        ("binary", "rgba"),
        ("sparse", "grayscale"),
        ("input", "grayscale"),
        (None, "rgb"),
    ],
)
def test_a_flow_from_a_directory_keeps_its_batches(folder, class_mode, color_mode):
    flow = of_folder(
        folder,
        class_mode=class_mode,
        color_mode=color_mode,
        shuffle=False,
        generator={"rescale": 1 / 255},
    )
    batches = from_flow(flow)
    assert isinstance(batches.reading().source, Source)
    assert_same(joined(batches), of_generator(flow))
    assert keras.tree.flatten(joined(batches))[0].dtype == np.float32


@pytest.mark.parametrize("subset", ["training", "validation"])
def test_a_subset_of_a_flow_keeps_its_examples(folder, subset):
    flow = of_folder(folder, subset=subset, shuffle=False, generator={"validation_split": 0.4})
    batches = from_flow(flow)
    assert batches.num_examples == {"training": 7, "validation": 3}[subset]
    assert_same(joined(batches), of_generator(flow))


def table(folder):
    pd = pytest.importorskip("pandas")
    files = sorted(str(path) for path in folder.glob("*/*"))
    return pd.DataFrame(
        {
            "filename": files,
            "class": ["cat"] * 7 + ["dog"] * 3,
            "several": [["cat"], ["dog"], ["cat", "dog"], ["cat"], ["dog"]] * 2,
            "one": np.arange(10.0),
            "two": np.arange(10, 20),
            "weight": np.linspace(0.1, 1, 10),
            "text": [f"text {number}" for number in range(10)],
        }
    )


@pytest.mark.parametrize(
    ("class_mode", "y_col", "weight_col"),
    [
        ("categorical", "class", None),
        ("categorical", "several", "weight"),
        ("binary", "class", None),
        ("sparse", "class", "weight"),
        ("raw", "two", None),
        ("raw", ["one", "two"], "weight"),
        ("multi_output", ["one", "two"], "weight"),
        ("input", None, None),
        ("input", None, "weight"),
    ],
    ids=str,
)
def test_a_flow_from_a_dataframe_keeps_its_batches(folder, class_mode, y_col, weight_col):
    flow = Generator(samplewise_center=True).flow_from_dataframe(
        table(folder),
        y_col=y_col,
        class_mode=class_mode,
        weight_col=weight_col,
        target_size=(12, 16),
        batch_size=4,
        shuffle=False,
        interpolation="bilinear",
    )
    batches = from_flow(flow)
    assert isinstance(batches.reading().source, Source)
    assert_same(joined(batches), of_generator(flow))


def test_targets_may_be_strings(folder):
    flow = Generator().flow_from_dataframe(
        table(folder), y_col="text", class_mode="raw", target_size=(4, 4), shuffle=False
    )
    assert joined(from_flow(flow))[1].tolist() == [f"text {n}".encode() for n in range(10)]


def test_class_names_and_counts_come_from_the_flow(folder):
    batches = from_flow(of_folder(folder))
    assert batches.class_names == ["cats", "dogs"]
    assert batches.class_counts == {"cats": 7, "dogs": 3}
    balanced = from_flow(of_folder(folder), balance="oversample")
    assert joined(balanced)[1].sum(0).tolist() == [7, 7]


def test_batch_size_seed_and_shuffle_come_from_the_flow(folder):
    flow = of_folder(folder, batch_size=3, seed=17, shuffle=False)
    batches = from_flow(flow)
    assert batches.global_batch_size == 3 and len(batches) == 4
    assert "seed=17" in repr(batches) and "shuffle=False" in repr(batches)
    assert from_flow(flow, global_batch_size=5).global_batch_size == 5
    assert from_flow(flow, replica_batch_size=5).reading().for_replicas(2).global_batch_size == 10


def test_draws_depend_on_seed_and_epoch_alone(folder):
    flow = of_folder(folder, generator={"brightness_range": (0.1, 1)}, class_mode=None)
    batches = from_flow(flow, seed=3, shuffle=False)
    np.random.seed(0)
    first = joined(batches)
    np.random.seed(1)
    state = np.random.get_state()[1].tolist()
    np.testing.assert_array_equal(joined(batches.with_(global_batch_size=7)), first)
    assert np.random.get_state()[1].tolist() == state
    assert (joined(batches, 1) != first).any()
    assert (joined(batches.with_(seed=4)) != first).any()


@pytest.mark.parametrize(
    ("changes", "draws"),
    [
        ({"rescale": 0.1}, False),
        ({"horizontal_flip": True}, True),
        ({"zoom_range": 0.1}, True),
        ({"brightness_range": (1, 2)}, True),
        ({"preprocessing_function": np.abs}, True),
    ],
)
def test_only_flows_that_augment_are_marked_random(folder, changes, draws):
    """Random flows are not cached."""
    assert from_flow(of_folder(folder, generator=changes)).reading().source.draws is draws


def test_damaged_files_are_named(folder, tmp_path):
    (tmp_path / "cats").mkdir()
    intact = (folder / "cats" / "0.jpg").read_bytes()
    (tmp_path / "cats" / "a.jpg").write_bytes(intact)
    (tmp_path / "cats" / "cut.jpg").write_bytes(intact[:300])
    (tmp_path / "cats" / "empty.png").write_bytes(b"")
    (tmp_path / "cats" / "text.jpg").write_bytes(b"no image")
    (tmp_path / "cats" / "gone.jpg").write_bytes(intact)
    flow = of_folder(tmp_path, class_mode="sparse", shuffle=False)
    (tmp_path / "cats" / "gone.jpg").unlink()
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"cut.jpg cannot be read: Pillow says: .*Truncated"
    ):
        joined(from_flow(flow))
    batches = from_flow(flow, on_error="skip")
    with pytest.warns(UserWarning, match="4 damaged examples"):
        x, _ = joined(batches)
    assert len(x) == 1
    names = sorted(entry.name.rsplit("/", 1)[1] for entry in batches.quarantine)
    assert names == ["cut.jpg", "empty.png", "gone.jpg", "text.jpg"]


# Flows of arrays.


def arrays():
    random = np.random.default_rng(0)
    return random.uniform(0, 255, (10, 6, 5, 3)).astype(np.float32), np.arange(10) % 2


@pytest.mark.parametrize(
    ("with_y", "with_misc", "with_weight"),
    [
        (True, False, False),
        (True, True, True),
        (False, False, True),
        (False, True, False),
    ],
)
def test_a_flow_of_arrays_keeps_its_batches(with_y, with_misc, with_weight):
    x, y = arrays()
    misc = [np.arange(10), np.linspace(0, 1, 20, dtype=np.float32).reshape(10, 2)]
    flow = Generator(rescale=0.5).flow(
        (x, misc) if with_misc else x,
        y if with_y else None,
        sample_weight=np.linspace(0, 1, 10) if with_weight else None,
        batch_size=4,
        shuffle=False,
    )
    batches = from_flow(flow)
    wanted = of_generator(flow)
    if with_misc and not with_y:
        # A tuple of inputs alone would be taken for (x, y).
        wanted = (wanted,)
    assert_same(joined(batches), wanted)
    assert (batches.class_counts is not None) == with_y


@pytest.mark.parametrize("dtype", [np.int64, bool, np.float16])
def test_weights_are_floats(dtype):
    x, y = arrays()
    flow = Generator().flow(x, y, sample_weight=y.astype(dtype), batch_size=4, shuffle=False)
    _, _, weight = joined(from_flow(flow))
    assert weight.dtype == np.float32 and weight.tolist() == y.tolist()


def test_arrays_are_not_changed():
    x, y = arrays()
    before = x.copy()
    joined(from_flow(Generator(rescale=0.5, rotation_range=9).flow(x, y)))
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize(
    "arguments",
    [{"featurewise_center": True}, {"zca_whitening": True, "featurewise_center": True}],
    ids=str,
)
def test_a_generator_without_its_statistics_is_refused(arguments):
    x, y = arrays()
    with pytest.raises(ValueError, match=r"Call `generator.fit\(x\)`"):
        from_flow(Generator(**arguments).flow(x, y))


# Flows that cannot be translated.


class Inverting(Generator):
    def standardize(self, x):
        return 255 - x


class Doubling(tf.keras.preprocessing.image.NumpyArrayIterator):  # noqa: TID251
    def _get_batches_of_transformed_samples(self, index_array):
        x, y = super()._get_batches_of_transformed_samples(index_array)
        return 2 * x, y


def untranslatable(tmp_path):
    x, y = arrays()
    first = x.transpose(0, 3, 1, 2)
    patched = Generator()
    patched.apply_transform = lambda x, parameters: x
    return [
        (Inverting().flow(x, y), "its generator has its own `standardize`"),
        (patched.flow(x, y), "its generator has its own `apply_transform`"),
        (Doubling(x, y, Generator()), "its class Doubling is not one of Keras's own"),
        (Generator(data_format="channels_first").flow(first, y), "`data_format` is not"),
        (Generator().flow(x, y, save_to_dir=str(tmp_path)), "`save_to_dir` asks for pictures"),
    ]


@pytest.mark.parametrize("case", range(5))
def test_a_flow_that_cannot_be_translated_runs_unchanged(case, tmp_path, caplog):
    flow, reason = untranslatable(tmp_path)[case]
    batches = from_flow(flow, shuffle=False)
    assert isinstance(batches.reading().source, Stream)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith(
        f"This flow runs as ImageDataGenerator itself would: {reason}"
    )
    assert batches.num_examples == 10 and len(batches) == 1
    flow.shuffle = False
    assert_same(joined(batches), of_generator(flow))


@pytest.mark.slow
def test_a_flow_that_cannot_be_translated_shuffles_itself(caplog):
    x, y = arrays()
    batches = from_flow(Inverting().flow(x, np.arange(10), batch_size=4, seed=5))
    orders = [joined(batches, epoch)[1].tolist() for epoch in (0, 1, 0)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(10))
    assert orders[0] != orders[1] and orders[0] == orders[2]
    assert joined(batches.evaluation())[1].tolist() == list(range(10))


class Noisy(Generator):
    """A generator that cannot be translated, and draws."""

    def random_transform(self, x, seed=None):
        return x + np.random.random()  # noqa: NPY002


def test_an_untranslated_flow_leaves_the_user_s_random_numbers_alone(caplog):
    """Whatever NumPy's global state is, its epochs are the same, also with several threads."""
    x, y = arrays()
    found = []
    for workers, seed in ((1, 0), (4, 1)):
        np.random.seed(seed)  # noqa: NPY002
        state = repr(np.random.get_state())  # noqa: NPY002
        flow = Noisy().flow(x, y, batch_size=2)
        flow.workers = workers
        batches = from_flow(flow)
        found += [joined(batches, epoch)[0] for epoch in (0, 1, 0)]
        assert repr(np.random.get_state()) == state  # noqa: NPY002
    for again in (found[2], found[3], found[5]):
        np.testing.assert_array_equal(again, found[0])
    assert (found[1] != found[0]).any()
    np.testing.assert_array_equal(found[1], found[4])


@pytest.mark.parametrize("arguments", [{"interpolation_order": 0}, {"fill_mode": "wrap"}])
def test_scipy_warps_where_opencv_would_differ(arguments):
    x, y = arrays()
    generator = Generator(rotation_range=30, **arguments)
    source = from_flow(generator.flow(x, y)).reading().source
    drawn = {**UNMOVED, "theta": 21.0, "tx": 1}
    image = x[0].astype(source.spec[0].dtype.as_numpy_dtype)
    wanted = generator.standardize(generator.apply_transform(image.copy(), drawn))
    np.testing.assert_array_equal(source.change_image(image.copy(), drawn), wanted)


def test_steps_are_refused_for_a_flow_of_images(folder):
    flow = of_folder(folder)
    with pytest.raises(ValueError, match="`steps` was given with a flow of images"):
        from_flow(flow, steps=3)


def test_evaluation_applies_no_augmentation():
    images = np.random.default_rng(0).uniform(0, 255, (5, 6, 8, 3))
    generator = Generator(
        rotation_range=40, horizontal_flip=True, brightness_range=(0.5, 2), rescale=1 / 255
    )
    batches = kmg.data.from_flow(generator.flow(images, np.arange(5), batch_size=5))
    (x, y) = next(iter(batches.evaluation().epoch(0)))
    assert y.numpy().tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(x, images / 255, rtol=1e-5)
    assert np.abs(next(iter(batches.with_(shuffle=False).epoch(0)))[0] - images / 255).max() > 0.1
