"""Accumulated gradients are summed once for each update, and nobody sees the parts."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import replicas_of
from helpers.moved_bytes import counting
from keras import layers

import keras_multigpu as kmg
from keras_multigpu.training.replication import replication_of

WIDTH, BATCH, EVERY = 64, 6, 4
DATA = np.random.default_rng(0).normal(size=(9 * BATCH - 1, WIDTH)).astype("float32")


def made(shape, parts, optimizer=None, replicas=0, **options):
    """A model, always with the same first weights; `parts` makes its layers."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input(shape), *parts(), layers.Dense(1)])
    if replicas:
        model = kmg.distribute(model, replicas_of(replicas))
    optimizer = optimizer or keras.optimizers.SGD(0.1, gradient_accumulation_steps=EVERY)
    model.compile(optimizer, "mse", **options)
    return model


def dense_model(optimizer=None, replicas=0, **options):
    def parts():
        return [layers.Dense(WIDTH, "tanh") for _ in range(3)]

    return made((WIDTH,), parts, optimizer, replicas, **options)


def train(model, data=DATA, **options):
    given = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    return model.fit(data, data[:, :1], **given)


def values_of(model):
    return [np.array(v) for v in (*model.variables, *model.optimizer.variables)]


def assert_equal(model, other, tolerance=2e-5):
    for one, two in zip(values_of(model), values_of(other), strict=True):
        np.testing.assert_allclose(two, one, rtol=tolerance, atol=tolerance)


def waiting(model):
    """How many accumulators may hold open sums."""
    (steps,) = replication_of(model).steps_of("train")
    return [len(runner.waiting) for runner in steps.runners]


class Spy(keras.callbacks.Callback):
    """Sees the accumulators after each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([np.array(v) for v in self.model.optimizer.variables])


def bytes_of(model, steps, **options):
    train(model, DATA[: BATCH * EVERY])
    with counting(replication_of(model).group) as moved:
        replication_of(model).forget_steps()
        train(model, DATA[: BATCH * steps], **options)
    return moved.total()


def test_replicas_sum_once_for_each_update():
    model = dense_model(replicas=2)
    gradients = 2 * 4 * sum(v.numpy().size for v in model.trainable_variables)
    # The loss and the metrics are summed in each step, and two numbers of the batch.
    few = 200 * EVERY
    assert gradients < bytes_of(model, EVERY) < gradients + few
    assert bytes_of(model, 2 * EVERY) < 2 * (gradients + few)
    assert waiting(model) == [8]


def by_hand(model):
    train(model)
    for start in (0, BATCH):
        model.train_on_batch(DATA[start : start + BATCH], DATA[start : start + BATCH, :1])


def two_epochs(model):
    train(model, epochs=2)


@pytest.mark.parametrize(
    ("trained", "options"),
    [
        (two_epochs, {"replicas": 2}),
        (two_epochs, {"replicas": 3, "steps_per_execution": 3, "micro_batches": 2}),
        (two_epochs, {"replicas": 3, "micro_batches": "auto"}),
        (two_epochs, {"replicas": 3, "jit_compile": True}),
        # These are summed each.
        (by_hand, {"replicas": 2}),
    ],
)
def test_what_waits_at_the_end_of_an_epoch_is_summed(trained, options):
    one, two = dense_model(), dense_model(**options)
    for model in (one, two):
        trained(model)
    assert waiting(two) == [8]
    assert_equal(one, two)
    first, *others = (copy.numpy() for copy in two.optimizer.variables[-1].value.values)
    assert np.any(first)
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_callbacks_see_the_sum_after_each_batch():
    spies = []
    for replicas in (0, 2):
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1, gradient_accumulation_steps=4)
        spies.append(Spy())
        train(dense_model(optimizer, replicas), callbacks=[spies[-1]])
    for one, two in zip(spies[0].seen, spies[1].seen, strict=True):
        for own, other in zip(one, two, strict=True):
            np.testing.assert_allclose(other, own, rtol=2e-5, atol=2e-6)


def test_someone_who_looks_costs_the_bytes_of_all_batches():
    model = dense_model(replicas=2)
    quiet = bytes_of(model, EVERY)
    assert 3.5 * quiet < bytes_of(model, EVERY, callbacks=[Spy()])


def test_a_checkpoint_after_each_epoch_does_not_look_at_batches(tmp_path):
    model = dense_model(replicas=2)
    quiet = bytes_of(model, EVERY)
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras")
    board = keras.callbacks.TensorBoard(tmp_path)
    assert bytes_of(model, EVERY, callbacks=[saved, board]) == quiet


class Interrupted(Exception):
    pass


def stopping(steps):
    for start in range(0, BATCH * steps, BATCH):
        yield DATA[start : start + BATCH], DATA[start : start + BATCH, :1]
    raise Interrupted


def test_an_interrupted_epoch_leaves_the_sum():
    one, two = dense_model(), dense_model(replicas=2)
    train(one, DATA[: 6 * BATCH])
    with pytest.raises(Interrupted):
        two.fit(stopping(6), verbose=0)
    assert_equal(one, two)
    for model in (one, two):
        train(model)
    assert_equal(one, two)


def test_a_step_for_longer_batches_takes_over_what_waits():
    """It is made, and tried, between two updates."""

    def batches():
        for length in (5, 5, 7, 7, 6, 7):
            yield DATA[: 4 * length].reshape(4, length, WIDTH), DATA[:4, :1]

    def parts():
        return [layers.Dense(8, "tanh"), layers.GlobalAveragePooling1D()]

    models = [made((None, WIDTH), parts, replicas=replicas) for replicas in (0, 2)]
    for x, y in batches():
        models[0].train_on_batch(x, y)
    models[1].fit(batches(), verbose=0, shuffle=False)
    assert waiting(models[1]) == [4, 4]
    assert_equal(*models)


def test_gradients_of_a_table_wait():
    words = np.random.default_rng(0).integers(0, 50, (30, 4))
    models = []
    for replicas in (0, 2):
        adam = keras.optimizers.Adam(gradient_accumulation_steps=3)
        model = made((4,), lambda: [layers.Embedding(50, 8), layers.Flatten()], adam, replicas)
        model.fit(words, words[:, :1], 4, verbose=0, shuffle=False)
        models.append(model)
    assert waiting(models[1]) == [3]
    assert_equal(*models)


def test_gradients_that_are_looked_at_do_not_wait():
    """Whether all are finite is no linear question."""
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    two = dense_model(keras.optimizers.LossScaleOptimizer(inner), replicas=2)
    train(two)
    assert waiting(two) == [0]


def test_an_accumulator_that_something_else_reads_does_not_wait():
    class Sizes(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            accumulator = self.optimizer._accumulated_gradients[0]
            return logs | {"size": keras.ops.norm(accumulator)}

    sizes = []
    for replicas in (0, 2):
        keras.utils.set_random_seed(1)
        given = keras.Input((WIDTH,))
        model = Sizes(given, layers.Dense(1)(given))
        if replicas:
            model = kmg.distribute(model, replicas_of(replicas))
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), "mse")
        sizes.append(train(model, DATA[: 3 * BATCH]).history["size"])
    assert waiting(model) == [1]  # The bias.
    np.testing.assert_allclose(sizes[1], sizes[0], rtol=2e-5)


@pytest.mark.filterwarnings("ignore:Epoch 1, step 4:UserWarning")
def test_a_rejected_step_leaves_what_waits():
    data = np.array(DATA)
    data[3 * BATCH : 4 * BATCH] = np.nan
    one, two = dense_model(), dense_model(replicas=2)
    train(one, np.delete(data, slice(3 * BATCH, 4 * BATCH), axis=0))
    train(two, data, callbacks=[kmg.callbacks.NaNGuard("skip")])
    weights = zip(one.trainable_variables, two.trainable_variables, strict=True)
    for own, other in weights:
        np.testing.assert_allclose(other, own, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_run_resumes_between_two_updates(tmp_path, replicas):
    class Stop(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.training_run.after_each("on_train_batch_end", self.stop)

        def stop(self):
            if self.model.training_run.step == 6:
                raise Interrupted

    def checkpoint():
        return kmg.callbacks.ResumableCheckpoint(tmp_path, every_steps=1)

    one, two = dense_model(), dense_model(replicas=2)
    train(one)
    with pytest.raises(Interrupted):
        train(two, callbacks=[checkpoint(), Stop()])
    assert waiting(two) == [8]
    resumed = dense_model(replicas=replicas)
    train(resumed, callbacks=[checkpoint()])
    assert int(resumed.optimizer._iterations) == len(DATA) // BATCH + 1
    assert_equal(one, resumed)


def test_a_worker_whose_others_are_gone_drops_its_part_and_says_so(monkeypatch, caplog):
    model = dense_model(replicas=2)
    sums = replication_of(model).open_sums

    class Alone(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.training_run.after_each("on_train_batch_end", self.fail)

        def fail(self):
            assert sums.are_open
            monkeypatch.setattr(sums, "_group", Spread())
            raise Interrupted

    class Spread:
        is_spread = True

    with pytest.raises(Interrupted):
        train(model, callbacks=[Alone()])
    for copy in model.optimizer.variables[-1].value.values:
        assert not np.any(copy.numpy())
    assert "the gradients that were accumulated for the next one are lost" in caplog.text
