"""`from_flow`: flows of `ImageDataGenerator` as `Batches`."""

import logging

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from keras_multigpu.data import from_flow

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


# Every flow as `from_flow` gives it back.


def arrays():
    random = np.random.default_rng(0)
    return random.uniform(0, 255, (10, 6, 5, 3)).astype(np.float32), np.arange(10) % 2


def of_table(folder, class_mode, y_col, weight_col=None):
    files = sorted(str(path) for path in folder.glob("*/*"))
    table = pd.DataFrame(
        {
            "filename": files,
            "class": ["cat"] * 7 + ["dog"] * 3,
            "several": [["cat"], ["dog"], ["cat", "dog"], ["cat"], ["dog"]] * 2,
            "one": np.arange(10.0),
            "two": np.arange(10, 20),
            "weight": np.linspace(0.1, 1, 10),
        }
    )
    settings = {"target_size": (12, 16), "batch_size": 4, "shuffle": False}
    return Generator(samplewise_center=True).flow_from_dataframe(
        table,
        y_col=y_col,
        class_mode=class_mode,
        weight_col=weight_col,
        interpolation="bilinear",
        **settings,
    )


def of_arrays(folder, misc=False, y=True, weight=None):
    x, labels = arrays()
    more = [np.arange(10), np.linspace(0, 1, 20, dtype=np.float32).reshape(10, 2)]
    return Generator(rescale=0.5).flow(
        (x, more) if misc else x,
        labels if y else None,
        sample_weight=weight,
        batch_size=4,
        shuffle=False,
    )


def in_order(folder, **arguments):
    return of_folder(folder, shuffle=False, **arguments)


WEIGHTS = np.linspace(0, 1, 10)
FLOWS = [
    (in_order, {"class_mode": "categorical"}),
    (in_order, {"class_mode": "binary", "color_mode": "rgba"}),
    (in_order, {"class_mode": "sparse", "color_mode": "grayscale"}),
    (in_order, {"class_mode": "input", "generator": {"rescale": 1 / 255}}),
    (in_order, {"class_mode": None}),
    (in_order, {"subset": "training", "generator": {"validation_split": 0.4}}),
    (in_order, {"subset": "validation", "generator": {"validation_split": 0.4}}),
    (of_table, {"class_mode": "categorical", "y_col": "class"}),
    (of_table, {"class_mode": "categorical", "y_col": "several", "weight_col": "weight"}),
    (of_table, {"class_mode": "binary", "y_col": "class"}),
    (of_table, {"class_mode": "sparse", "y_col": "class", "weight_col": "weight"}),
    (of_table, {"class_mode": "raw", "y_col": "two"}),
    (of_table, {"class_mode": "raw", "y_col": ["one", "two"], "weight_col": "weight"}),
    (of_table, {"class_mode": "multi_output", "y_col": ["one", "two"], "weight_col": "weight"}),
    (of_table, {"class_mode": "input", "y_col": None}),
    (of_table, {"class_mode": "input", "y_col": None, "weight_col": "weight"}),
    (of_arrays, {}),
    (of_arrays, {"misc": True, "weight": WEIGHTS}),
    (of_arrays, {"y": False, "weight": WEIGHTS}),
    (of_arrays, {"y": False, "misc": True}),
    *((of_arrays, {"weight": (WEIGHTS > 0.4).astype(kind)}) for kind in (int, bool, np.float16)),
]


@pytest.mark.parametrize(("make", "arguments"), FLOWS, ids=str)
def test_a_flow_keeps_its_batches(make, arguments, folder, caplog):
    """Pixels, targets, weights, and their structure; weights become floats."""
    flow = make(folder, **arguments)
    batches = from_flow(flow)
    assert not caplog.records
    found, wanted = joined(batches), of_generator(flow)
    # A tuple of inputs alone would be taken for (x, y).
    wanted = (wanted,) if arguments.get("misc") and not arguments.get("y", True) else wanted
    assert_same(found, wanted)
    assert batches.num_examples == len(keras.tree.flatten(wanted)[0])
    assert keras.tree.flatten(found)[0].dtype == np.float32
    if isinstance(found, tuple) and len(found) == 3:
        assert found[2].dtype == np.float32


def test_targets_may_be_strings(folder):
    flow = of_table(folder, "raw", "filename")
    assert joined(from_flow(flow))[1].tolist() == [name.encode() for name in flow.labels]


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
    """Evaluation draws nothing."""
    flow = of_folder(folder, generator={"brightness_range": (0.1, 1)}, class_mode=None)
    batches = from_flow(flow, seed=3, shuffle=False)
    assert_same(joined(batches.evaluation()), of_generator(in_order(folder, class_mode=None)))
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


def test_arrays_are_not_changed():
    x, y = arrays()
    before = x.copy()
    joined(from_flow(Generator(rescale=0.5, rotation_range=9).flow(x, y)))
    np.testing.assert_array_equal(x, before)


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
