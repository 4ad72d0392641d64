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
from keras_multigpu.callbacks.statistics_mean import copied_statistics

pytestmark = [
    pytest.mark.usefixtures("unoptimized_graphs"),
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


def copies_of(model, variable):
    """The values of a variable on all replicas."""
    storage = keras_internals.variable_storage(variable)
    return [part.numpy() for part in model.distribute_strategy.experimental_local_results(storage)]


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


@pytest.mark.parametrize(
    ("replicas", "options"),
    [(4, {"steps_per_execution": 2}), (2, {"run_eagerly": True})],
)
@pytest.mark.slow
def test_all_replicas_get_the_mean(replicas, options, tmp_path):
    """After an epoch; what was validated is what is saved."""
    model, path = stock(replicas, **options), tmp_path / "epoch.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(path)
    history = fit(model, EvaluationAveraging(), checkpoint, validation_data=(X, Y))
    for found, values in zip(statistics(model), EXPECTED[replicas], strict=True):
        np.testing.assert_allclose(found, np.full(replicas, np.mean(values)), rtol=1e-6)
        assert len(set(found)) == 1, "To the last bit."
    loaded = keras.models.load_model(path)
    np.testing.assert_allclose(history["val_loss"], loaded.evaluate(X, Y, 8, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("when", ["fit", "validation", "evaluate", "predict"])
@pytest.mark.slow
def test_when_statistics_are_averaged(when):
    """At the end of epochs, unless switched off, and whenever inference begins."""
    model = stock(2)
    averaging = EvaluationAveraging(before_saving=when == "fit")
    if when in ("fit", "validation"):
        fit(model, averaging, **({} if when == "fit" else {"validation_data": (X, Y)}))
    else:
        fit(model, averaging)
        np.testing.assert_allclose(statistics(model)[0], EXPECTED[2][0], rtol=1e-6)
        if when == "evaluate":
            model.evaluate(X, Y, 8, verbose=0, callbacks=[averaging])
        else:
            model.predict(X, 8, verbose=0, callbacks=[averaging])
    np.testing.assert_allclose(statistics(model)[0], [2.5, 2.5], rtol=1e-6)


@pytest.mark.slow
def test_the_logged_validation_is_that_of_the_mean():
    """The loss of the mean statistics, computed here in NumPy."""
    model = stock(2)
    history = fit(model, EvaluationAveraging(), validation_data=(X, Y))
    mean, variance = (np.mean(values) for values in EXPECTED[2])
    gamma, beta = (float(v.numpy()[0]) for v in model.get_layer("norm").trainable_variables)
    kernel, bias = (value.item() for value in model.get_layer("last").get_weights())
    normed = gamma * (X - mean) / np.sqrt(variance + 1e-3) + beta
    expected = np.mean((kernel * normed + bias - Y) ** 2)
    np.testing.assert_allclose(history["val_loss"], [expected], rtol=1e-5)


@pytest.mark.slow
def test_training_is_not_changed():
    """Trained weights are bit for bit those without it, over several epochs."""
    weights = []
    for callbacks in ([], [EvaluationAveraging()]):
        model = stock(2)
        fit(model, *callbacks, epochs=2, validation_data=(X, Y))
        weights.append([v.numpy() for v in model.trainable_variables])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_equal_copies_keep_their_bits_and_frozen_layers_are_left_out():
    """A third of three equal numbers three times may not be the number."""
    third = np.full((1, 1), 0.1, "float32") / 3

    def model():
        made = keras.Sequential(layers())
        made.get_layer("norm").moving_mean.assign(third[0])
        frozen = keras.layers.Dense(1, trainable=False)
        return keras.Sequential([made, frozen])

    model = stock(3, model=model)
    assert len(copied_statistics(model)) == 2
    model.evaluate(X[:6], Y[:6], 6, verbose=0, callbacks=[EvaluationAveraging()])
    norm = model.layers[0].get_layer("norm")
    assert copies_of(model, norm.moving_mean) == [third[0]] * 3


@pytest.mark.slow
def test_statistics_that_are_not_finite_are_left_out():
    """With a warning that names the device; the others' mean is everybody's."""
    model = stock(4)
    fit(model)
    storage = keras_internals.variable_storage(model.get_layer("norm").moving_mean)
    storage.values[2].assign([np.nan])
    with pytest.warns(UserWarning, match="not finite, and were left out of.*CPU:2'\\]"):
        model.evaluate(X, Y, 8, verbose=0, callbacks=[EvaluationAveraging()])
    np.testing.assert_allclose(statistics(model)[0], [9.5 / 3] * 4, rtol=1e-6)
    for part in storage.values:
        part.assign([np.inf])
    with pytest.warns(UserWarning, match="not finite"):
        model.evaluate(X, Y, 8, verbose=0, callbacks=[EvaluationAveraging()])
    np.testing.assert_array_equal(statistics(model)[0], [np.inf] * 4)


@pytest.mark.slow
def test_it_is_compiled_once():
    """For a model, and anew for another one."""
    averaging, model = EvaluationAveraging(), stock(2)
    fit(model, averaging, epochs=2)
    first = averaging._mean
    fit(model, averaging)
    assert averaging._mean is first
    fit(stock(2), averaging)
    assert averaging._mean is not first


def distributed():
    """A model that needs no averaging."""
    model = kmg.distribute(keras.Sequential(layers()), replicas_of(2))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (distributed, "EvaluationAveraging: it is not needed: a model from"),
        (lambda: stock(1), "EvaluationAveraging: there is one copy of the statistics"),
    ],
)
@pytest.mark.slow
def test_where_it_is_not_needed_it_says_so_once(model, text, caplog):
    """And changes nothing, however often it is used."""
    model, averaging = model(), EvaluationAveraging()
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        fit(model, averaging, epochs=2, validation_data=(X, Y))
        model.evaluate(X, Y, 8, verbose=0, callbacks=[averaging])
    (record,) = caplog.records
    assert record.message.startswith(text)
    assert averaging._mean is None


@pytest.mark.slow
def test_a_model_without_statistics():
    """There is nothing to do, and nothing to say."""
    made = stock(2, model=lambda: keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    averaging = EvaluationAveraging()
    fit(made, averaging)
    assert averaging._mean is None


def savers(folder):
    """Callbacks of Keras that keep the weights of an epoch."""
    return [
        keras.callbacks.ModelCheckpoint(folder / "a.keras"),
        keras.callbacks.BackupAndRestore(folder / "backup"),
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
    ]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.slow
def test_callbacks_that_save_come_later(number, tmp_path):
    """In front they are refused, unless nothing is to be averaged for them."""
    saver = savers(tmp_path)[number]
    text = f"{type(saver).__name__} stands before EvaluationAveraging.*Move it to the front"
    model = stock(2)
    with pytest.raises(ValueError, match=text):
        fit(model, saver, EvaluationAveraging())
    if number == 0:
        fit(model, EvaluationAveraging(), saver)
        fit(model, savers(tmp_path)[number], EvaluationAveraging(before_saving=False))


@pytest.mark.slow
def test_saving_between_epochs_is_warned_of(tmp_path):
    """Those files have the statistics of the first replica."""
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "a.keras", save_freq=1)
    model = stock(2)
    with pytest.warns(UserWarning, match="ModelCheckpoint saves between epochs.*save_freq=1"):
        fit(model, EvaluationAveraging(), checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, EvaluationAveraging(), keras.callbacks.EarlyStopping("loss"))


def test_bad_arguments():
    """A frequency, say."""
    with pytest.raises(ValueError, match="`before_saving` is neither.*before_saving=3"):
        EvaluationAveraging(3)
