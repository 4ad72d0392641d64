"""`keras-multigpu rehearse`: real scripts, in real processes, and what is said about them."""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
from helpers.processes_left import as_users_start_it, ended_process, python_path

from keras_multigpu.commands import main
from keras_multigpu.rehearsal import guard

HEAD = """
import os, sys
import keras, numpy as np
import keras_multigpu as kmg

keras.utils.set_random_seed(1)
x, y = np.ones((100, 4), "float32"), np.arange(100) % 3


def compiled(*layers, rate=0.1):
    layers = [keras.Input((4,)), *layers, keras.layers.Dense(3, "softmax")]
    model = kmg.distribute(keras.Sequential(layers))
    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
    return model
"""

FAILS = """
class WrongHook(keras.callbacks.Callback):
    def on_epoch_end(self, epoch):
        pass


class WithLambda(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


Save, Rate = keras.callbacks.ModelCheckpoint, keras.callbacks.LearningRateScheduler
short = keras.optimizers.schedules.CosineDecay(0.1, 30)
compiled(rate=short).fit(
    x, y, 32, epochs=10**12, validation_split=0.2,
    callbacks=[
        keras.callbacks.EarlyStopping("val_acc", mode="max"),
        WrongHook(),
        Save("all/{epoch}.weights.h5", save_weights_only=True),
        kmg.callbacks.ResumableCheckpoint("gs://no_such_bucket/run"),
    ],
)
y[-1] = 3
sys.modules["tensorboard.summary.v2"] = None
more = [Rate(lambda epoch: [0.1, 0.2][epoch]), keras.callbacks.TensorBoard("board")]
compiled().fit(x, y, 32, epochs=3, callbacks=more, shuffle=False)
y[-1] = 0
compiled(WithLambda(lambda x: keras.ops.reshape(x, (32, 4)))).fit(x, y, 32)
compiled(WithLambda(lambda x: x)).fit(x, y, 32, callbacks=[Save("whole.keras", save_freq=50)])
many = np.zeros((10**6, 4), "float32")
wide = [keras.layers.Dense(10**5, kernel_initializer="zeros", use_bias=False)]
grows = kmg.callbacks.BatchSizeScaling(32, schedule={0: 32, 5: 10**6})
compiled(*wide).fit(many, np.zeros(10**6), 32, epochs=9, callbacks=[grows])
import no_such_package
"""

FAILURES = [
    ("fit 1", "metric names", "fails", "EarlyStopping looks for 'val_acc'"),
    ("fit 1", "callbacks", "fails", "WrongHook.on_epoch_end: TypeError"),
    ("fit 1", "schedule", "fails", "CosineDecay has 30 steps, the training 3,000,000,000,000"),
    ("fit 1", "disk", "fails", "ModelCheckpoint 1,000,000,000,000 times"),
    # Of the user's disk: only the rehearsal has the folder `all`.
    ("fit 1", "disk", "fails", "failing0 -> Keep fewer"),
    ("fit 1", "kill and resume", "ok", ""),
    ("fit 1", "save and load", "ok", ""),
    ("fit 2", "labels", "fails", "from 0 to 3, with 3 outputs"),
    ("fit 2", "schedule", "fails", "in epoch 3: IndexError"),
    ("fit 2", "kill and resume", "note", "a kill loses all of this training"),
    ("fit 3", "last batch", "fails", "4 examples"),
    ("fit 4", "save and load", "fails", "non-serializable"),
    ("fit 5", "memory", "fails", "1,000,000 examples take about"),
    ("fit 2", "callbacks", "fails", "`pip install tensorboard`."),
    ("script", "to its end", "fails", "No module named 'no_such_package', train.py:"),
    ("script", "to its end", "fails", "`pip install no_such_package`?"),
]

# By many roads, of paths that exist and others, relative and absolute.
WRITES = """
import pathlib, shutil, subprocess, tempfile
import tensorflow as tf

here = pathlib.Path(__file__).parent
if not os.path.exists("second start"):
    with open("old.txt", "a") as file:
        file.write("more")
    assert open("old.txt").read() == "old\\nmore"
    (here / "new" / "deep").mkdir(parents=True)
    (here / "new" / "deep" / "file").write_text("new")
    assert [path.name for path in here.glob("new/**/file")] == ["file"]
    os.remove(here / "gone.txt")
    assert not os.path.exists("gone.txt") and "gone.txt" not in os.listdir()
    os.rename("moved.txt", here / "kept" / "moved.txt")
    shutil.rmtree("removed")
    assert not (here / "removed").exists()
    assert sorted(os.listdir("kept")) == ["inner.txt", "moved.txt"]
    tf.io.gfile.rmtree(str(here / "other"))
    assert not tf.io.gfile.exists("other")
    np.save("array.npy", np.ones(3))
    tf.io.gfile.makedirs(str(here / "g"))
    with tf.io.gfile.GFile("g/text", "w") as file:
        file.write("text")
    assert tf.io.gfile.listdir("g") == ["text"]
    with tf.io.gfile.GFile("gs://no_bucket/folder/text", "w") as file:
        file.write("text")
    assert tf.io.gfile.GFile("gs://no_bucket/folder/text").read() == "text"
    assert tempfile.NamedTemporaryFile().name != ""
    open("second start", "w").close()

model = compiled()
callbacks = [
    keras.callbacks.BackupAndRestore("backup"),
    keras.callbacks.CSVLogger(here / "kept" / "log.csv"),
    keras.callbacks.ModelCheckpoint("best.keras"),
    keras.callbacks.TensorBoard("board", profile_batch=1),
]
history = model.fit(x, y, 50, epochs=2, callbacks=callbacks)
model.save("final.keras")
assert keras.models.load_model("final.keras").count_params() == model.count_params()
model.save_weights(here / "final.weights.h5")
model.load_weights("final.weights.h5")
model.export("exported")
exported = tf.saved_model.load("exported")
assert exported.serve(x).shape == (100, 3)
tf.train.Checkpoint(model=model).save("ckpt/c")
assert tf.train.latest_checkpoint("ckpt")
if LANDLOCK:
    try:
        tf.io.write_file("unknown_road", "x")
    except tf.errors.OpError:
        print("refused")
    assert subprocess.run(["touch", str(here / "by_a_program")]).returncode
print("read back")
"""

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "tutorials" / "rehearse.md"


def rehearsed(folder, body, *options, **variables):
    (folder / "train.py").write_text(body)
    before = contents(folder)
    words = (
        ["train.py"] if variables else ["-m", "keras_multigpu", "rehearse", *options, "train.py"]
    )
    path = {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "-1"}
    ended = ended_process([sys.executable, *words], cwd=folder, env=os.environ | path | variables)
    assert contents(folder) == before
    return ended.returncode, ended.stdout


def contents(folder):
    return {
        str(path.relative_to(folder)): path.is_file() and hashlib.sha256(path.read_bytes()).digest()
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    return rehearsed(tmp_path_factory.mktemp("failing"), HEAD + FAILS)


@pytest.mark.slow
@pytest.mark.parametrize("row", FAILURES, ids=lambda row: f"{row[0]} {row[1]} {row[3][:9]}")
def test_what_would_fail_later(row, failing):
    code, printed = failing
    assert code == 1
    where, check, verdict, says = row
    unwrapped = re.sub(r"\n {34}", " ", printed)
    lines = [line for line in unwrapped.splitlines() if line.startswith(f"{where:<9}{check:<17}")]
    assert any(line[26:].startswith(verdict) and says in line for line in lines), printed


@pytest.mark.slow
def test_a_note_is_made_once(failing):
    assert failing[1].count("a kill loses all of this training") == 1


@pytest.mark.slow
def test_nothing_is_written_into_the_users_folders(tmp_path):
    """The script reads back what it writes, and a folder's listing and contents stay."""
    for folder in ("kept", "removed", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "inner.txt").write_text("inner")
    for name in ("old", "gone", "moved"):
        (tmp_path / f"{name}.txt").write_text("old\n")
    has_landlock = guard.version() > 0
    body = HEAD + WRITES.replace("LANDLOCK", str(has_landlock))
    code, printed = rehearsed(tmp_path, body, KMG_REHEARSE="1")
    assert code == 0, printed
    assert "read back" in printed
    assert "fit 1    kill and resume  ok" in printed
    assert ("refused" in printed) == has_landlock


@pytest.mark.slow
def test_the_page_shows_what_two_workers_find_in_the_example(tmp_path):
    """Keras's own callbacks write on the chief alone, so they are not among them."""
    body = (EXAMPLES / "rehearse.py").read_text("utf-8")
    code, printed = rehearsed(tmp_path, body, "--workers", "2")
    assert code == 1, printed
    fails = re.findall(r"^(?:fit 1|script) .* fails .*(?:\n {34}(?!->).*)*", printed, re.M)
    shown = re.findall(r"^(?:fit 1|script) .* fails .*(?:\n {34}(?!->).*)*", PAGE.read_text(), re.M)
    assert re.sub(r"\s", "", "".join(fails)).replace(str(tmp_path), "/home/me") == re.sub(
        r"\s", "", "".join(shown)
    )
    assert "fit 1    kill and resume  ok" in printed


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("trian.py", "There is no such script. Expected the path"),
        ("no_such_module", "There is no such script. Expected the path"),
        ("train.ipynb", "This is a notebook. .* `jupyter nbconvert --to script train.ipynb`"),
    ],
)
def test_what_is_no_script(name, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.ipynb").write_text("{}")
    assert main(["rehearse", name]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_one_of_several_workers_needs_a_folder_that_they_share(monkeypatch, capsys):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert main(["rehearse", "json.tool"]) == 2
    assert "Expected `--folder`, or `KMG_REHEARSE`, to name" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_no_script_cannot_be_rehearsed():
    words = [sys.executable, "-c", "import keras_multigpu"]
    ended = ended_process(words, env=as_users_start_it(KMG_REHEARSE="1"))
    assert "`KMG_REHEARSE` is set where there is no script" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "says"), [(0, "ok      no error"), (3, "fails   SystemExit: 3, train.py:3\n")]
)
def test_a_module_that_exits_is_rehearsed_as_well(code, says, tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text(
        "import keras_multigpu, sys\nopen('new', 'w').close()\n"
        f"print(__package__, sys.argv[1:]) or sys.exit({code})"
    )
    words = [sys.executable, "-m", "pack.train", "-v"]
    ended = ended_process(words, cwd=tmp_path, env=as_users_start_it(KMG_REHEARSE="1"))
    assert ended.returncode == bool(code), ended.stdout + ended.stderr
    assert "pack ['-v']" in ended.stdout
    assert f"script   to its end       {says}" in ended.stdout
    assert ("training         note    no `fit` was called" in ended.stdout) == (code == 0)
    assert not (tmp_path / "new").exists()
