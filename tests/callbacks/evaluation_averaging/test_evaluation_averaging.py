"""`EvaluationAveraging` mends what stock Keras does with BatchNorm statistics, shown first."""

import logging
import warnings

import keras
import numpy as np
import pytest
from cpu_replicas import replicas_of

import keras_multigpu as kmg
from keras_multigpu import keras_internals
from keras_multigpu.callbacks import EvaluationAveraging
from keras_multigpu.callbacks.evaluation_averaging.mean import copied_statistics

pytestmark = [
    # Keras itself saves mirrored variables in a way that NumPy 2 does not like.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),
]

X = np.array([[0], [2], [10], [14], [1], [1], [4], [8]], "float32")
Y = np.linspace(-1, 1, 8).astype("float32")[:, None]

# The moving mean begins at 0 and the variance at 1; with momentum 0.5 one step makes them
# mean / 2 and (1 + variance) / 2 of each replica's examples.
EXPECTED = {
    # [0, 2, 10, 14] and [1, 1, 4, 8]
    2: ([6.5 / 2, 3.5 / 2], [(1 + 32.75) / 2, (1 + 8.25) / 2]),
    # [0, 2], [10, 14], [1, 1] and [4, 8]
    4: ([0.5, 6.0, 0.5, 3.0], [1.0, 2.5, 0.5, 2.5]),
}


def layers():
    """Batch statistics of one feature, and something to train."""
    return [
        keras.Input((1,)),
        keras.layers.BatchNormalization(momentum=0.5, epsilon=1e-3, name="norm"),
        keras.layers.Dense(1, kernel_initializer="ones", name="last"),
    ]


def stock(replicas, rate=0.1, model=None, **options):
    """A plain Keras model in the scope of a strategy."""
    with replicas_of(replicas).scope():
        model = model() if model else keras.Sequential(layers())
        model.compile(keras.optimizers.SGD(rate), "mse", **options)
    return model


def fit(model, *callbacks, **arguments):
    """One step over all eight examples."""
    given = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks), **arguments}
    return model.fit(X, Y, 8, **given).history


def parts_of(model, variable):
    """A variable's copies."""
    storage = keras_internals.variable_storage(variable)
    return model.distribute_strategy.experimental_local_results(storage)


def copies_of(model, variable):
    """The values of a variable on all replicas."""
    return [part.numpy() for part in parts_of(model, variable)]


def statistics(model):
    """Mean and variance on each replica."""
    norm = model.get_layer("norm")
    return [
        np.reshape(copies_of(model, variable), -1)
        for variable in (norm.moving_mean, norm.moving_variance)
    ]


def saved(model, path):
    """What a reader of the saved file gets, on one device."""
    model.save(path)
    return keras.models.load_model(path)


@pytest.mark.slow
def test_stock_keras_has_a_model_for_each_replica(tmp_path, replicas=2):
    """The failing case: statistics differ, and only those of the first replica are saved."""
    model = stock(replicas)
    fit(model)
    for found, expected in zip(statistics(model), EXPECTED[replicas], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    reader = saved(model, tmp_path / "model.keras")
    np.testing.assert_allclose(
        reader.get_layer("norm").moving_mean, EXPECTED[replicas][0][:1], rtol=1e-6
    )
    validated = model.evaluate(X, Y, 8, verbose=0)
    assert abs(reader.evaluate(X, Y, 8, verbose=0) - validated) > 0.01 * validated


@pytest.mark.slow
def test_all_replicas_get_the_mean(tmp_path):
    """After an epoch of Keras's own `fit`; what was validated is what is saved."""
    model, path = stock(2), tmp_path / "epoch.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(path)
    history = fit(model, EvaluationAveraging(), checkpoint, validation_data=(X, Y))
    for found, values in zip(statistics(model), EXPECTED[2], strict=True):
        np.testing.assert_allclose(found, np.full(2, np.mean(values)), rtol=1e-6)
        assert len(set(found)) == 1, "To the last bit."
    loaded = keras.models.load_model(path)
    np.testing.assert_allclose(history["val_loss"], loaded.evaluate(X, Y, 8, verbose=0), rtol=1e-5)


def trained(replicas):
    """A stock model whose replicas have the statistics that they would have after a step."""
    model = stock(replicas)
    norm = model.get_layer("norm")
    for variable, values in zip(
        (norm.moving_mean, norm.moving_variance), EXPECTED[replicas], strict=True
    ):
        for part, value in zip(parts_of(model, variable), values, strict=True):
            part.assign([value])
    return model


def called(model, hook, *callbacks):
    """Call a hook as Keras's loops do."""
    arguments = (0,) if "epoch" in hook or "batch" in hook else ()
    getattr(keras.callbacks.CallbackList(list(callbacks), model=model), hook)(*arguments)


@pytest.mark.parametrize(
    ("hook", "replicas"), [("on_epoch_end", 2), ("on_test_begin", 4), ("on_predict_begin", 2)]
)
def test_when_statistics_are_averaged(hook, replicas):
    """At the end of epochs, unless switched off, and whenever inference begins."""
    model = trained(replicas)
    weights = [copies_of(model, variable) for variable in model.trainable_variables]
    means = np.mean(EXPECTED[replicas], axis=1, keepdims=True).repeat(replicas, axis=1)
    called(model, hook, EvaluationAveraging(before_saving=False))
    expected = EXPECTED[replicas] if hook == "on_epoch_end" else means
    np.testing.assert_allclose(statistics(model), expected, rtol=1e-6)
    called(model, hook, EvaluationAveraging())
    np.testing.assert_allclose(statistics(model), means, rtol=1e-6)
    assert weights == [copies_of(model, variable) for variable in model.trainable_variables]


def test_steps_of_training_change_nothing():
    """They do not use moving statistics, so they are bit for bit what they are without."""
    model = trained(2)
    for hook in ("on_train_begin", "on_train_batch_begin", "on_train_batch_end"):
        called(model, hook, EvaluationAveraging())
    np.testing.assert_array_equal(statistics(model), EXPECTED[2])


def test_equal_copies_keep_their_bits_and_frozen_layers_are_left_out():
    """A third of three equal numbers three times may not be the number."""
    third = np.full((1, 1), 0.1, "float32") / 3

    def model():
        made = keras.Sequential(layers())
        made.get_layer("norm").moving_mean.assign(third[0])
        frozen = keras.layers.Dense(1, trainable=False)
        return keras.Sequential([keras.Input((1,)), made, frozen])

    model = stock(3, model=model)
    assert len(copied_statistics(model)) == 2
    called(model, "on_test_begin", EvaluationAveraging())
    norm = model.layers[0].get_layer("norm")
    assert copies_of(model, norm.moving_mean) == [third[0]] * 3


def test_statistics_that_are_not_finite_are_left_out():
    """With a warning that names the device; the others' mean is everybody's."""
    model = stock(4)
    parts = parts_of(model, model.get_layer("norm").moving_mean)
    for part, value in zip(parts, [0.5, 6.0, np.nan, 3.0], strict=True):
        part.assign([value])
    with pytest.warns(UserWarning, match="not finite, and were left out of.*CPU:2'\\]"):
        called(model, "on_test_begin", EvaluationAveraging())
    np.testing.assert_allclose(statistics(model)[0], [9.5 / 3] * 4, rtol=1e-6)
    for part in parts:
        part.assign([np.inf])
    with pytest.warns(UserWarning, match="not finite"):
        called(model, "on_test_begin", EvaluationAveraging())
    np.testing.assert_array_equal(statistics(model)[0], [np.inf] * 4)


def test_it_is_compiled_once():
    """For a model, and anew for another one."""
    averaging, model = EvaluationAveraging(), stock(2)
    called(model, "on_epoch_end", averaging)
    first = averaging._mean
    called(model, "on_test_begin", averaging)
    assert averaging._mean is first
    called(stock(2), "on_test_begin", averaging)
    assert averaging._mean is not first


def distributed():
    """A model that needs no averaging."""
    model = kmg.distribute(keras.Sequential(layers()), replicas_of(2))
    model.compile("sgd", "mse")
    return model


HOOKS = ["on_train_begin", "on_epoch_end", "on_test_begin", "on_predict_begin"]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (distributed, "EvaluationAveraging: it is not needed: a model from"),
        (lambda: stock(1), "EvaluationAveraging: there is one copy of the statistics"),
    ],
)
def test_where_it_is_not_needed_it_says_so_once(model, text, caplog):
    """And changes nothing, however often it is used."""
    model, averaging = model(), EvaluationAveraging()
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        for hook in HOOKS * 2:
            called(model, hook, averaging)
    (record,) = caplog.records
    assert record.message.startswith(text)
    assert averaging._mean is None


def test_a_model_without_statistics():
    """There is nothing to do, and nothing to say."""
    made = stock(2, model=lambda: keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    averaging = EvaluationAveraging()
    for hook in HOOKS:
        called(made, hook, averaging)
    assert averaging._mean is None


def savers(folder):
    """Callbacks of Keras that keep the weights of an epoch."""
    return [
        keras.callbacks.ModelCheckpoint(folder / "a.keras"),
        keras.callbacks.BackupAndRestore(folder / "backup"),
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
    ]


@pytest.mark.parametrize("number", range(3))
def test_callbacks_that_save_come_later(number, tmp_path):
    """In front they are refused, unless nothing is to be averaged for them."""
    saver = savers(tmp_path)[number]
    text = f"{type(saver).__name__} stands before EvaluationAveraging.*Move it to the front"
    model = stock(2)
    with pytest.raises(ValueError, match=text):
        fit(model, saver, EvaluationAveraging())
    called(model, "on_train_begin", EvaluationAveraging(), saver)
    called(model, "on_train_begin", saver, EvaluationAveraging(before_saving=False))


def test_saving_between_epochs_is_warned_of(tmp_path):
    """Those files have the statistics of the first replica."""
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "a.keras", save_freq=1)
    model = stock(2)
    with pytest.warns(UserWarning, match="ModelCheckpoint saves between epochs.*save_freq=1"):
        called(model, "on_train_begin", EvaluationAveraging(), checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stopping = keras.callbacks.EarlyStopping("loss")
        called(model, "on_train_begin", EvaluationAveraging(), stopping)


def test_bad_arguments():
    """A frequency, say."""
    with pytest.raises(ValueError, match="`before_saving` is neither.*before_saving=3"):
        EvaluationAveraging(3)
