"""`Trace`: the content of the file, by hand and against the clock."""

import json
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from helpers.naps import Nap, with_naps
from helpers.own_step import UnseenStep

from keras_multigpu.callbacks import Trace
from keras_multigpu.callbacks.trace import Call, clock_offsets, trace_of

pytestmark = pytest.mark.usefixtures("python_sees_rows")

X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")


def group_of(replicas, workers=1):
    """The part of a group that a trace uses."""
    return types.SimpleNamespace(
        count=replicas,
        worker_of=lambda replica: replica * workers // replicas,
        device_of=lambda replica: f"GPU:{replica}",
    )


def spans(content, row=None):
    """The name, row, beginning, end and step of each span, in seconds."""
    return [
        (e["name"], e["tid"] - 1, e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["args"].get("step"))
        for e in content["traceEvents"]
        if e["ph"] == "X" and row in (None, e["tid"] - 1)
    ]


def test_the_spans_by_hand():
    """Two replicas, two steps; the second replica gets its examples before its update ends."""
    times = np.array(
        [
            [[0, 0, 0, 100.0], [0, 0, 0, 100.5]],
            [[101, 102, 104, 105.0], [101, 103, 104, 106.0]],
            [[107, 108, 110, 111.0], [105, 108, 109, 110.0]],
        ]
    )
    content = trace_of(group_of(2), 7, times, [[Call(100.5, 5.0, 0.25, 0.0, 1)]])
    names = ["wait", "pass", "sum", "update"]
    assert spans(content, 0) == [
        (name, 0, begin - 100, end - 100, step)
        for step, ends in ((7, [100, 101, 102, 104, 105]), (8, [105, 107, 108, 110, 111]))
        for name, begin, end in zip(names, ends[:-1], ends[1:], strict=True)
    ]
    assert [end - begin for _, _, begin, end, _ in spans(content, 1)] == [
        *(0.5, 2, 1, 2),
        *(0, 2, 1, 1),
    ]
    assert spans(content, 2) == [("data", 2, 0.25, 0.5, None), ("call", 2, 0.5, 5.5, None)]


def test_spans_meet_to_the_microsecond():
    """Viewers drop a span that begins before the one ahead of it in its row has ended."""
    took = np.random.default_rng(1).uniform(1e-6, 1e-4, (200, 1, 4))
    times = 1.8e9 + took.ravel().cumsum().reshape(took.shape)
    events = trace_of(group_of(1), 1, times, [[]])["traceEvents"]
    found = [event for event in events if event["ph"] == "X"]
    assert len(found) == 199 * 4
    assert [e["ts"] + e["dur"] for e in found[:-1]] == [e["ts"] for e in found[1:]]


def test_the_clocks_of_workers_are_aligned():
    """By the moment when all have the sums. The second clock is 50 s ahead."""
    times = np.cumsum(np.ones((3, 2, 4)), axis=2) + np.arange(3)[:, None, None] * 5.0 + 1000
    times[:, 1] += 50.0
    assert clock_offsets(times[1:, :, 2], [0, 1]).tolist() == [0.0, 50.0]
    calls = [[Call(1005.0, 4.0, 0.0, 0.0, 1)], [Call(1055.0, 4.0, 0.0, 0.0, 1)]]
    content = trace_of(group_of(2, 2), 1, times, calls)
    rows = [[each[2:] for each in spans(content, row)] for row in range(2)]
    assert rows[0] == rows[1]
    assert {(e["pid"], e["tid"]) for e in content["traceEvents"] if e["ph"] == "X"} == {
        *((1, 1), (2, 2)),
        *((1, 3), (2, 3)),
    }
    assert content["otherData"] == {"clocks are ahead of worker 0's, ms": [0.0, 50000.0]}


class Ends(keras.callbacks.Callback):
    """Remembers when steps ended."""

    def __init__(self):
        super().__init__()
        self.times = []

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.time())


def slow_data(nap):
    def wait(x):
        def nap_and_give(values):
            time.sleep(nap)
            return values

        x = tf.ensure_shape(tf.numpy_function(nap_and_give, [x], tf.float32), [None, 4])
        return x, x

    return tf.data.Dataset.from_tensor_slices(X).batch(8).map(wait)


def model_of(*layers, **compiled):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), *layers, keras.layers.Dense(4)]
    model = on_replicas(keras.Sequential(layers), 2)
    model.compile("adam", "mse", **compiled)
    return model


@pytest.mark.parametrize(
    "compiled",
    [
        {},
        pytest.param({"steps_per_execution": 2}, marks=pytest.mark.slow),
        pytest.param({"run_eagerly": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@with_naps
@pytest.mark.in_test_all("one kind of step shows it", after=1)
def test_the_spans_of_a_step_are_its_wall_time(compiled, nap, tmp_path):
    """Each batch comes after naps, and the pass takes two. Steps 5 to 8 are of two epochs."""
    model, ends = model_of(Nap(2 * nap), **compiled), Ends()
    path = tmp_path / "trace.json"
    trace = Trace(path, steps=(5, 8), verbose=0)
    x = slow_data(3 * nap)
    model.fit(x, epochs=2, verbose=0, callbacks=[ends, trace])
    content = json.loads(path.read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json"}
    k = compiled.get("steps_per_execution", 1)
    for row in range(2):
        found = spans(content, row)
        assert [(name, step) for name, _, _, _, step in found] == [
            (name, step) for step in range(5, 9) for name in ("wait", "pass", "sum", "update")
        ]
        # Without gaps.
        np.testing.assert_allclose([e[2] for e in found[1:]], [e[3] for e in found[:-1]], atol=1e-5)
        took = {name: sum(e[3] - e[2] for e in found if e[0] == name) for name, *_ in found}
        assert took["pass"] == pytest.approx(4 * 2 * nap, rel=0.3)
        assert took["wait"] > 0.5 * 4 * nap
        if k == 1:
            # The whole is what the clock says between the ends of these steps.
            wall = ends.times[7] - ends.times[3]
            assert sum(took.values()) == pytest.approx(wall, abs=0.2 * nap)
    host = spans(content, 2)
    assert [name for name, *_ in host] == ["data", "call"] * len(host[::2])
    assert len(host) == 2 * (4 if k == 1 else 3)


def test_a_fit_that_ends_early_writes_the_steps_it_had(tmp_path, caplog):
    """If there are none, the log says why there is no file."""
    model, path = model_of(), tmp_path / "some.json"
    model.fit(X, X, batch_size=8, verbose=0, callbacks=[Trace(path, steps=(4, 40), verbose=0)])
    assert {each[-1] for each in spans(json.loads(path.read_text()), 0)} == {4, 5}
    model.fit(X, X, batch_size=8, verbose=0, callbacks=[Trace(tmp_path / "none.json")])
    assert "ended after 5 steps, and steps=(10, 15)" in caplog.text


@pytest.mark.slow
def test_a_step_that_cannot_be_inspected_has_the_calls_of_the_host(tmp_path, capsys):
    """The same object traces another `fit`."""
    path = tmp_path / "trace.json"
    trace = Trace(path, steps=(2, 3))
    model = on_replicas(UnseenStep(keras.layers.Dense(4)), 2)
    model.compile("sgd", "mse")
    model.fit(X, X, batch_size=8, verbose=0, callbacks=[trace])
    content = json.loads(path.read_text())
    assert {name for name, *_ in spans(content)} == {"data", "call"}
    assert f"Trace: {path} has steps 2 to 3; open it in Perfetto." in capsys.readouterr().out
    model = model_of()
    model.fit(X, X, batch_size=8, verbose=0, callbacks=[trace])
    assert len(spans(json.loads(path.read_text()), 1)) == 8


@pytest.mark.parametrize("steps", [3, (3,), (0, 2), (5, 4), (1.0, 2), (True, 2), "ab", None])
def test_bad_steps_are_named(steps, tmp_path):
    with pytest.raises(ValueError, match="not a first and a last step.*Expected two.*Received: st"):
        Trace(tmp_path / "a.json", steps=steps)


def test_a_file_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a JSON file"):
        Trace(tmp_path / "a.txt")
