"""`verify` compares trainings, and names the first difference."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.data.addresses import Unreachable
from keras_multigpu.verification import batches, comparison, in_this_process
from keras_multigpu.verification.comparison import differences, nudge, relative_difference
from keras_multigpu.verification.participants import Value
from keras_multigpu.verification.verification import Report, Verification
from verification import verified_models as models


@pytest.fixture(autouse=True)
def same_weights():
    """Every test starts from the same random weights."""
    keras.utils.set_random_seed(0)


@pytest.mark.parametrize("build_model", [models.begins_at_its_weights, models.half_precision])
@pytest.mark.slow
def test_models_agree(build_model, capsys):
    """With full and partial batches, and random draws. The table is printed."""
    result = kmg.verify(build_model, models.data, replicas=(2,), steps=3)
    assert result.agrees, result
    assert capsys.readouterr().out == f"{result.text}\n"
    assert str(result) == "<Verification 2: agrees>", (
        "so that printing it does not repeat the table"
    )


@pytest.mark.slow
def test_a_difference_is_named_and_reported():
    """Doubled targets double the gradients, so the first weight differs after the first step."""
    result = kmg.verify(models.learns_elsewhere, models.data, replicas=(2, 3), steps=1)
    assert [report.replicas for report in result.reports] == [2, 3]
    for report in result.reports:
        assert not report.agrees
        assert (report.step, report.first_difference) == (1, "last/kernel")
        assert report.largest_difference == pytest.approx(0.5, abs=0.1)
    told = "2 and 3 replicas: replicas must not differ from one device: this is a bug"
    assert told in result.text


@pytest.mark.slow
def test_a_training_that_one_device_does_not_repeat_is_no_bug_of_replicas():
    """Unseeded draws differ even on one device."""
    (report,) = kmg.verify(models.unrepeatable, models.data, replicas=(2,), steps=1).reports
    assert not report.agrees
    assert report.remark.startswith("this training is not repeatable on one device either")


def test_verify_leaves_the_random_state_of_the_script_alone():
    """Its draws after `verify` still depend on its own seed."""
    drawn = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        kmg.verify(models.right, models.data, replicas=(2,), steps=1)
        drawn.append(np.random.random())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
def test_amplified_rounding_is_no_difference():
    """Adam takes full steps along a gradient that is only rounding, and the remark says so."""
    build_model = models.batch_norm_with_adam
    (report,) = kmg.verify(build_model, models.data, replicas=(2,), steps=3).reports
    assert report.agrees
    assert report.largest_difference > 2e-5
    assert "first/bias" in report.remark


@pytest.mark.slow
def test_a_difference_that_float64_all_but_removes_is_rounding(monkeypatch):
    """Even if a changed bit has a smaller effect. A real error remains (see above)."""
    monkeypatch.setattr(comparison, "ROUNDING_FACTOR", 0)
    build_model = models.batch_norm_with_adam
    found = kmg.verify(build_model, models.data, replicas=(2,), steps=3)
    assert found.agrees
    assert "in float64 it all but disappears" in found.reports[0].remark
    assert found.text.count("is rounding that this model amplifies") == 1
    assert keras.config.floatx() == keras.config.dtype_policy().name == "float32"


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)
def test_the_last_bits_of_frozen_weights_change_too():
    """In transfer learning frozen layers amplify rounding. Integer weights are unchanged."""
    frozen = keras.layers.Dense(4, use_bias=False, trainable=False)
    model = keras.Sequential([keras.Input((3,)), frozen, keras.layers.Dense(1, use_bias=False)])
    model.layers[-1].quantize("int8")
    before = model.get_weights()
    nudge(model, "float32")
    after = model.get_weights()
    assert not np.array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1], before[1])
    np.testing.assert_allclose(after[0], before[0], rtol=3e-7)


X, Y = np.zeros((40, 3)), np.ones((40, 1))


def batched():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(9)


@pytest.mark.parametrize(
    ("arguments", "message", "received"),
    [
        ({"build_model": models.right()}, "`build_model` is not a function", "build_model"),
        ({"build_model": models.not_compiled}, "a model that is not compiled", "build_model"),
        ({"build_model": lambda: 1}, "`build_model` returned <class 'int'>", "build_model"),
        ({"replicas": (1, 2)}, "`replicas` is not a list of numbers of replicas", "replicas"),
        ({"replicas": 2}, "`replicas` is not a list of numbers of replicas", "replicas"),
        ({"steps": 0}, "`steps` is not a positive integer", "steps"),
        ({"data": lambda: iter([])}, "`data` ran out after 0 batches", "data"),
        ({"data": (X, Y, X, Y)}, "`data` is more than the inputs and targets", "shapes"),
        ({"data": ((X, Y), (X[:9], Y[:9]))}, "`data` is more than the inputs", "shapes"),
        ({"data": lambda: (batched(),) * 2}, "`data` is more than the inputs", "shapes"),
        ({"data": models.arrays}, "`data` gives single examples", "shapes"),
        ({"data": lambda: iter([(X[0], 1.0)])}, "`data` gives single examples", "shapes"),
        ({"data": (X, Y)}, "The model fails on one device already, in step 1", "batch_size"),
    ],
)
def test_bad_arguments_are_named(arguments, message, received):
    """In one line, also where Keras's own error has several."""
    with pytest.raises(ValueError, match=f"{message}.* Expected .*Received: {received}=") as error:
        kmg.verify(**{"build_model": models.right, "data": models.data, **arguments})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("gpus", "expected"), [(0, [2, 4]), (1, [2, 4]), (2, [2]), (3, [2, 3]), (8, [2, 8])]
)
def test_two_gpus_and_all_are_compared_by_default(monkeypatch, gpus, expected):
    """Four replicas would leave two GPUs idle, and compare logical CPU devices."""
    monkeypatch.setattr(in_this_process, "device_count", {"GPU": gpus}.get)
    assert in_this_process.usual_replicas() == expected


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        ((X, Y), [32, 8, 32]),
        ((X, Y, np.ones(40)), [32, 8, 32]),
        (lambda: (X, Y), [32, 8, 32]),
        (tf.data.Dataset.from_tensor_slices((X, Y)).batch(30), [30, 10, 30]),
        (lambda: iter([(X, Y), (X[:2], Y[:2]), (X, Y), (X, Y)]), [40, 2, 40]),
    ],
)
def test_data_may_have_many_forms(data, sizes):
    """Arrays are read in batches of 32, and short data from the start again."""
    found = batches.first_batches(data, 3)
    assert [batches.number_of_examples(batch) for batch in found] == sizes


def test_data_that_cannot_be_read_are_named():
    """Not by TensorFlow's text, which names one of its operations."""

    class Fails(list):
        def __getitem__(self, index):
            if index == 1:
                raise TimeoutError("no answer")
            return np.ones(3), np.ones(1)

    data = kmg.data.from_source(Fails([0, 1]), global_batch_size=2)
    with pytest.raises(Unreachable, match="^item 1 of .* could not be read.*no answer"):
        batches.first_batches(data, 1)


def test_too_few_devices_are_an_error():
    """This process has eight. The shell's command is a process of its own."""
    with pytest.raises(
        RuntimeError, match=r"strategy\(devices=9\).*`keras-multigpu verify my_model"
    ):
        kmg.verify(models.right, models.data, replicas=(2, 9))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([0.0], [2.0], 1.0),
        ([0.0], [0.0], 0.0),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([np.nan], [1.0], np.inf),
        ([1.0], [1.0, 2.0], np.inf),
    ],
)
def test_differences_are_relative_to_the_largest_value(one, other, expected):
    """Not element by element: a small weight among large ones may lose digits."""
    assert relative_difference(one, other) == expected


def test_variables_of_only_one_side_are_no_difference():
    """Optimizers create variables when first used. The others are still compared."""
    weight = Value("kernel", "dense", (0, 0), [np.array([4.0])])
    momentum = Value("optimizer kernel_momentum", "momentum", (1, 2), [np.array([1.0])])
    second = Value("optimizer rate", "rate", (2, 0), [np.array([2.0])])
    changed = second._replace(copies=[np.array([2.0]), np.array([1.0])])
    assert differences([weight, momentum, second], [weight, changed]) == [0.0, 0.0, 0.5]
    assert differences([weight, changed], [weight, momentum, second]) == [0.0, 0.0]


def test_the_table_is_printed_as_expected():
    """The whole text, for one number of replicas that agrees and one that does not."""
    reports = (
        Report(2, 0.51, 0.51, 3e-07),
        Report(4, 0.51, 0.75, 0.2, "dense/kernel", 3, remark="This is a bug."),
        Report(8, step=1, error="ValueError: no", remark="This is a bug."),
    )
    result = Verification(reports, 10, "GPUs", 2e-05)
    assert result.text == Path(__file__).with_name("verify_table.txt").read_text().rstrip("\n")
    assert repr(result) == "<Verification 2: agrees, 4: DIFFERS, 8: crashes>"
