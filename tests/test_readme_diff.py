"""The diff at the top of the README: both sides run, and train to the same weights."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.documented_code import blocks_of
from helpers.picture_files import encoded, picture
from helpers.processes_left import as_users_start_it, ended_process

README = Path(__file__).parents[1] / "README.md"

# Parts of the diff and what replaces them here, to train less or in a fixed order.
SMALLER = {
    "image_size=(224, 224)": "image_size=(32, 32), shuffle=False",
    "keras.applications.MobileNetV3Small(weights=None, classes=10)": "small_model()",
    "epochs=10": "epochs=3, verbose=0",
    "batch_size=64": "batch_size=8",
}

BEFORE = """
import json
import keras

def small_model():
    keras.utils.set_random_seed(0)
    layers = [keras.Input((32, 32, 3)), keras.layers.Rescaling(1 / 255)]
    layers += [keras.layers.Conv2D(4, 3, strides=2), keras.layers.GlobalAveragePooling2D()]
    return keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])

"""

AFTER = """
print(json.dumps({
    "classes": photos.class_names,
    "steps": len(photos),
    "loss": model.history.history["loss"],
    "accuracy": model.history.history["accuracy"],
    "weights": [weight.ravel().tolist() for weight in model.get_weights()],
    "predictions": model.predict(photos, verbose=0).tolist(),
}))
"""


def side(sign: str) -> str:
    """The README's script before (`-`) or after (`+`) the change."""
    block = next(block for block in blocks_of(README) if block.language == "diff")
    return "".join(
        line[1:] for line in block.code.splitlines(keepends=True) if line[0] in (" ", "\n", sign)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten classes of three pictures."""
    folder = tmp_path_factory.mktemp("diff")
    for kind in range(10):
        place = folder / "photos" / f"class_{kind}"
        place.mkdir(parents=True)
        for number in range(3):
            image = picture()[number : number + 40, :40] // (1 + kind)
            (place / f"{number}.jpg").write_bytes(encoded(image, "JPEG"))
    return folder


BOTH = """
import sys
from pathlib import Path
for script in sys.argv[1:]:
    exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__"})
"""


def whole_script(sign):
    """One side, with a small model, and what it prints at the end."""
    script = side(sign)
    for original, smaller in SMALLER.items():
        assert script.count(original) == 1, f"{original} is not in the README's diff"
        script = script.replace(original, smaller)
    return BEFORE + script + AFTER


def printed(folder, *command):
    """What a Python command prints, as a user would run it."""
    command, environment = [sys.executable, *command], as_users_start_it(README.parent)
    ended = ended_process(command, env=environment, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def results(folder):
    """What both sides print, one after the other in a process: it starts slowly."""
    for name, sign in {"before.py": "-", "after.py": "+"}.items():
        (folder / name).write_text(whole_script(sign))
    lines = printed(folder, "-c", BOTH, "before.py", "after.py").splitlines()
    before, after = map(json.loads, filter(re.compile(r"\{").match, lines))
    return {"-": before, "+": after}


def test_the_diff_only_adds_an_import_and_a_call():
    before, after = side("-").splitlines(), side("+").splitlines()
    added = [line for line in after if line not in before]
    assert added == ["import keras_multigpu as kmg", "model = kmg.distribute(model)"]
    assert [line for line in after if line in before] == before


@pytest.mark.slow
def test_the_batch_size_stays_that_of_one_step(results):
    """Thirty pictures are four steps of eight, of which the last has six."""
    assert results["+"]["steps"] == results["-"]["steps"] == 4
    assert len(results["+"]["predictions"]) == 30


def assert_same(found, expected):
    for name in ("weights", "predictions", "loss", "accuracy"):
        for value, one in zip(found[name], expected[name], strict=True):
            np.testing.assert_allclose(value, one, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_both_sides_train_to_the_same_weights(results):
    """With the same losses and predictions."""
    assert_same(results["+"], results["-"])
