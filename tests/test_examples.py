"""Every script in `examples/` runs, learns something and draws its pictures."""

import importlib
import json
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from helpers.documented_code import same_text
from helpers.processes_left import as_users_start_it, ended_process

import keras_multigpu as kmg

EXAMPLES = Path(__file__).parents[1] / "examples"
HELPERS = Path(__file__).parent / "helpers"
TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"

# Arguments of each `main` for a short training on two replicas. It returns a share of 1, such as
# an accuracy.
ARGUMENTS = {
    "augment_images": {"epochs": 3, "replicas": 2},
    "contrastive": {"epochs": 3, "replicas": 2},
    "custom_loop": {"epochs": 1, "replicas": 2},
    "draw_callbacks": {"epochs": 2, "replicas": 2},
    "fit_into_memory": {"epochs": 3, "replicas": 2},
    "gan": {"epochs": 20, "replicas": 2},
    "gradient_noise_scale": {"epochs": 2, "replicas": 2},
    "hub_model": {"epochs": 3, "replicas": 2},
    "imbalanced_classes": {"epochs": 2, "replicas": 2},
    "one_script": {"epochs": 2, "replicas": 2},
    "own_train_step": {"epochs": 1, "replicas": 2},
    "policy_gradient": {"epochs": 5, "replicas": 2},
    "rehearse": {"epochs": 3, "replicas": 2},
    "resume_training": {"epochs": 4, "replicas": 2},
    "scale_batch_and_warm_up": {"epochs": 3, "replicas": 2},
    "tabular": {"epochs": 4, "replicas": 2},
    "text_classification": {"epochs": 4, "replicas": 2},
    "trackers": {"epochs": 3, "replicas": 2},
    "train_from_directory": {"epochs": 1, "replicas": 2},
    "train_from_image_data_generator": {"epochs": 4, "replicas": 2, "each": 8},
    "train_from_records": {"epochs": 2, "replicas": 2, "kind": "tfrecord"},
    "train_from_tfds": {"epochs": 1, "replicas": 2},
    "train_on_replicas": {"epochs": 1, "replicas": 2},
    "train_separately": {"folds": 2, "epochs": 1, "devices": 2},
    "transfer_learning": {"epochs": 3, "replicas": 2},
    "tune": {"rounds": 1, "each": 2, "epochs": 1, "devices": 2},
    "vae": {"epochs": 4, "replicas": 2},
    "watch_each_replica": {"epochs": 6, "replicas": 2},
    "weights_in_parts": {"epochs": 1, "replicas": 2},
}

# Each takes 15 CPU seconds or more. The other examples, or tests of the same steps, cover what
# these use.
IN_TEST_ALL = {
    *(
        "augment_images",
        "contrastive",
        "fit_into_memory",
        "gan",
        "hub_model",
        "policy_gradient",
        "train_separately",
        "tune",
    ),
    *("scale_batch_and_warm_up", "tabular", "transfer_learning", "vae", "watch_each_replica"),
    *("train_from_image_data_generator", "train_from_records", "weights_in_parts"),
}

RUNNING = {
    name: arguments
    for name, arguments in ARGUMENTS.items()
    if name not in IN_TEST_ALL or ALL_REPLICAS
}

# The pictures that each draws. Its tutorial shows those of a longer training.
PICTURES = {
    "augment_images": ["augmented.png", "segmented.png"],
    "imbalanced_classes": ["imbalanced_classes.png"],
    "resume_training": ["resume_training.png"],
    "scale_batch_and_warm_up": ["songs.png", "scale_batch_and_warm_up.png"],
    "tabular": ["tabular.png"],
    "train_from_directory": ["pieces.png", "puzzles.png"],
    "train_from_image_data_generator": ["train_from_image_data_generator.png"],
    "train_from_tfds": ["train_from_tfds.png"],
    "train_separately": ["train_separately.png"],
    "transfer_learning": ["transfer_learning.png"],
    "watch_each_replica": ["watch_each_replica.png", "throughput.png"],
}

RUN = f"""
import importlib, json, sys
sys.path[:0] = {[str(EXAMPLES), str(HELPERS)]!r}
from graph_optimizer import unoptimized_if_quick
unoptimized_if_quick()
for name, arguments in {RUNNING!r}.items():
    print("example", name)
    result = importlib.import_module(name).main(**arguments)
    print("result", json.dumps([name, result]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def printed(folder):
    """Each example's output; all run in one process because TensorFlow starts slowly."""
    ended = ended_process([sys.executable, "-c", RUN], cwd=folder, env=as_users_start_it())
    assert ended.returncode == 0, ended.stderr
    parts = re.split(r"^example (\w+)$", ended.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def results(printed):
    lines = re.findall(r"^result (.+)$", "\n".join(printed.values()), flags=re.MULTILINE)
    return dict(map(json.loads, lines))


def test_every_example_is_tested():
    """A new file needs a line in `ARGUMENTS`."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == ARGUMENTS.keys()


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.slow
def test_an_example_learns_something(name, results):
    """After a short training it does twice as well as guessing, which is right a tenth of the time.

    The GAN, which rounding sways, reached 0.27 to 0.36.
    """
    assert results[name] > 0.2


@pytest.mark.parametrize("name", ["custom_loop", "gan", "vae", "policy_gradient", "contrastive"])
def test_the_page_on_custom_loops_shows_each_loop(name):
    page = (TUTORIALS / "custom_loops.md").read_text(encoding="utf-8")
    assert f'--8<-- "examples/{name}.py:loop"' in page


@pytest.mark.parametrize("name", [name for name in PICTURES if name in RUNNING])
@pytest.mark.slow
def test_an_example_writes_complete_pictures(name, folder, printed):
    """PNG files, with no partial file left beside them."""
    for picture in PICTURES[name]:
        content = (folder / picture).read_bytes()
        assert content.startswith(b"\x89PNG") and content.endswith(b"IEND\xaeB`\x82")
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("name", PICTURES)
def test_a_tutorial_shows_its_code_and_pictures(name):
    """The pictures are small, to keep the repository and the page light."""
    page = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    assert f'--8<-- "examples/{name}.py:' in page
    for picture in PICTURES[name]:
        assert f"(images/{picture})" in page
        assert (TUTORIALS / "images" / picture).stat().st_size < 150_000


@pytest.mark.parametrize("name", ["imbalanced_classes", "train_from_directory", "train_from_tfds"])
@pytest.mark.slow
def test_a_tutorial_shows_what_the_example_prints_about_its_data(name, printed):
    """The data does not depend on the length of the training."""
    lines = re.findall(r"^Batches.*$|^\{.*\}$", printed[name], flags=re.MULTILINE)
    page = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    assert lines
    assert all(line in page for line in lines)


@pytest.mark.slow
def test_a_tutorial_shows_the_losses_that_the_example_prints(printed):
    """On one device and on replicas, equal up to rounding."""
    texts = (TUTORIALS / "text.md").read_text(encoding="utf-8"), printed["text_classification"]
    shown, found = (re.search(r"^ +1( +[\d.]+){2}", text, re.MULTILINE) for text in texts)
    assert same_text(shown[0], found[0])


def encoded_table(example):
    """A model, and a dataset that encodes the rows of its table."""
    homes, prices = example.sold_homes(45)
    rows = tf.data.Dataset.from_tensor_slices((homes, prices))
    features = example.build_features()
    features.adapt(rows.map(lambda home, price: home))

    def build():
        model = example.build_model(features.get_encoded_features())
        model.compile("adam", "mae", metrics=[keras.metrics.R2Score()])
        return model

    return build, rows.batch(32).map(lambda home, price: (features(home), price))


@pytest.mark.slow
def test_training_on_an_encoded_table_equals_one_device(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    build, data = encoded_table(importlib.import_module("tabular"))
    result = kmg.verify(build, data, replicas=(2,), steps=2)
    assert result.agrees, result


def test_the_noise_scale_by_hand(monkeypatch):
    """Gradients 1 and 3: variance 2, mean 2, so |g|^2 is 4 - 2/2 = 3, and the scale 2/3."""
    monkeypatch.syspath_prepend(EXAMPLES)
    callback = importlib.import_module("gradient_noise_scale").NoiseScale()
    layer = keras.layers.Dense(1, kernel_initializer="zeros", bias_initializer="ones")
    model = kmg.distribute(keras.Sequential([layer]), kmg.strategy(devices=2))
    model.compile(
        keras.optimizers.SGD(0.0), lambda y, p: tf.reduce_sum(tf.square(y - p), axis=-1) / 2
    )
    x, y = np.zeros((3, 1)), np.array([[0.0], [-2.0], [7.0]])
    # The last step has a single example, and nothing to compare.
    history = model.fit(x, y, 2, epochs=2, shuffle=False, verbose=0, callbacks=[callback]).history
    np.testing.assert_allclose(history["noise_scale"], [2 / 3] * 2, rtol=1e-6)


def test_tar_archives_are_a_source(monkeypatch, tmp_path):
    """Of the same digits as TFRecord files, and in the same order."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("train_from_records")
    for kind in ("tar", "tfrecord"):
        example.write_shards(tmp_path / kind, kind)
    samples = example.TarSamples(sorted((tmp_path / "tar").iterdir()))
    settings = {"global_batch_size": 64, "seed": 3}
    tars = kmg.data.from_source(samples, example.of_tar, **settings)
    records = kmg.data.from_records(tmp_path / "tfrecord", example.of_tfrecord, **settings)
    for found, expected in zip(tars.epoch(1).take(3), records.epoch(1).take(3), strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
