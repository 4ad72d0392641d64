"""`shard="optimizer"`: replicas divide the optimizer's state, and no number changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from helpers.cpu_replicas import replicas_of

import keras_multigpu as kmg
from keras_multigpu.keras_internals.variable_internals import variable_storage
from keras_multigpu.training.replica_group import copies_of, is_in_parts, parts_or_copies
from keras_multigpu.training.variables import placement

SIZE = 257
"""A kernel of this size squared is not joined with other weights."""
X = np.random.default_rng(0).normal(size=(7, SIZE)).astype("float32")
optimizers = keras.optimizers
OPTIMIZERS = {
    "conditions": lambda: optimizers.LossScaleOptimizer(
        optimizers.AdamW(
            1e-2,
            weight_decay=0.1,
            global_clipnorm=0.1,
            gradient_accumulation_steps=2,
            use_ema=True,
            ema_overwrite_frequency=2,
        )
    )
}
EVERY = {
    "Adam, averages, clipnorm": lambda: optimizers.Adam(1e-2, clipnorm=0.1, use_ema=True),
    "Adam, accumulation": lambda: optimizers.Adam(1e-2, gradient_accumulation_steps=2),
    "SGD": lambda: optimizers.SGD(1e-2, momentum=0.9, nesterov=True, clipvalue=0.01),
    "RMSprop": lambda: optimizers.RMSprop(1e-3, centered=True, momentum=0.5, weight_decay=0.1),
    "AdamW": lambda: optimizers.AdamW(1e-2, global_clipnorm=0.1),
    "amsgrad": lambda: optimizers.Adam(1e-2, amsgrad=True),
    "Lion": lambda: optimizers.Lion(1e-3),
    "Lamb": lambda: optimizers.Lamb(1e-3),
    "Nadam": lambda: optimizers.Nadam(1e-3),
    "Muon": lambda: optimizers.Muon(1e-3),
    "Adafactor": lambda: optimizers.Adafactor(1e-2),
    "Adagrad": lambda: optimizers.Adagrad(1e-2),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adamax": lambda: optimizers.Adamax(1e-2),
    "Ftrl": lambda: optimizers.Ftrl(1e-2),
    "MultiOptimizer": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.Adam(1e-2), {".*/bias": optimizers.SGD(1e-2, momentum=0.9)}
        )
    ),
}


def made():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(SIZE, "tanh"), keras.layers.Dense(SIZE, use_bias=False)]
    layers.append(keras.layers.Dense(1, use_bias=False))
    return keras.Sequential([keras.Input((SIZE,)), *layers])


def placed(shards, count=2):
    return kmg.distribute(
        made(), replicas_of(count), self_check=shards, shard="optimizer" if shards else None
    )


def values(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def trained(shards, optimizer, count=2, **options):
    model = placed(shards, count)
    model.compile(optimizer, "mse", **options)
    losses = [model.train_on_batch(X, X[:, :1]) for _ in range(3)]
    return model, [*losses, *values(model)]


def assert_equal(one, other):
    for first, second in zip(one, other, strict=True):
        np.testing.assert_array_equal(first, second)


def parts(variable):
    return parts_or_copies(variable_storage(variable))


def divided(model):
    return [v.path for v in model.optimizer.variables if is_in_parts(variable_storage(v))]


BY_NORMS = ("Lamb", "Muon")
"""These need sums over a whole weight, of which each replica has its part."""


@pytest.mark.parametrize(
    ("name", "count"),
    [("conditions", 2)]
    + [(name, count) for name in OPTIMIZERS | EVERY for count in (2, 3, 4) if ALL_REPLICAS],
)
def test_sharding_changes_no_bit(name, count):
    optimizer = (OPTIMIZERS | EVERY)[name]
    model, sharded = trained(True, optimizer(), count)
    whole = trained(False, optimizer(), count)[1]
    for one, other in zip(sharded, whole, strict=True):
        rounding = {"rtol": 2e-5, "atol": 1e-6} if name in BY_NORMS else {"rtol": 0}
        np.testing.assert_allclose(one, other, **rounding)
    large = [v for v in model.optimizer.variables if v.shape == (SIZE, SIZE)]
    assert divided(model) == [v.path for v in large] != []
    for variable in large:
        assert [part.device[-5:] for part in parts(variable)] == [f"CPU:{n}" for n in range(count)]
        lengths = [part.shape[0] for part in parts(variable)]
        assert sum(lengths) == SIZE and max(lengths) < SIZE and min(lengths) > 0


def test_each_slot_is_made_in_parts():
    """A model that fits only divided must not need the memory of the whole state before."""
    made = []

    def noted(create, **options):
        made.append(create(**options))
        return made[-1]

    with tf.variable_creator_scope(noted):
        model, _ = trained(True, optimizers.Adam(1e-2))
    whole = {v.name.rpartition("/")[2] for v in made if v.shape == (SIZE, SIZE)}
    assert len(divided(model)) == 4 and whole == {"kernel:0"}
    for variable in model.optimizer.variables:
        if is_in_parts(storage := variable_storage(variable)):
            # What a graph of one device has in its place holds no memory, not even after the trial.
            held = tf.raw_ops.VarIsInitializedOp(resource=storage.handle)
            assert not held or storage.stand_in.read_value().shape == (0,)


class Mixing(keras.optimizers.Optimizer):
    """Divides by a statistic of all weights, as Prodigy and D-Adaptation do."""

    def build(self, variables):
        super().build(variables)
        self.seen = [self.add_variable_from_reference(v, "seen") for v in variables]
        self.mean = [self.add_variable_from_reference(v, "mean") for v in variables]
        self.total = self.add_variable((), "ones", name="total")

    def update_step(self, gradient, variable, rate):
        place = self._get_variable_index(variable)
        self.assign_add(self.seen[place], gradient**2)
        self.assign_add(self.total, keras.ops.mean(self.seen[place]))
        self.assign(self.mean[place], 0.9 * self.mean[place] + gradient)
        self.assign_sub(variable, rate * self.mean[place] / self.total)


needs_all = pytest.mark.in_test_all("one training shows the numbers")


@needs_all
def test_state_that_several_weights_need_is_sharded_too():
    model, sharded = trained(True, Mixing(1e-2))
    for one, other in zip(sharded, trained(False, Mixing(1e-2))[1], strict=True):
        # Means add up in another order.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert {path.rpartition("_")[2] for path in divided(model)} == {"mean", "seen"}


@needs_all
def test_a_step_with_two_updates_is_sharded_too():
    class Twice(keras.Model):
        def train_step(self, data):
            for _ in range(2):
                logs = super().train_step(data)
            return logs

    found = []
    for shard in (None, "optimizer"):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((SIZE,))
        model = Twice(inputs, keras.layers.Dense(1)(keras.layers.Dense(SIZE)(inputs)))
        model = kmg.distribute(model, replicas_of(2), shard=shard)
        model.compile("adam", "mse")
        model.train_on_batch(X, X[:, :1])
        found.append(values(model))
    assert_equal(*found)
    assert len(divided(model)) == 2


@needs_all
@pytest.mark.parametrize(
    "options", [{"micro_batches": 2}, {"jit_compile": True}, {"run_eagerly": True}]
)
def test_sharding_works_with_other_options_of_compile(options):
    model, sharded = trained(True, optimizers.Adam(1e-2), **options)
    assert_equal(sharded, trained(False, optimizers.Adam(1e-2), **options)[1])
    assert divided(model)


class TwoOptimizers(keras.Model):
    """Builds them while its step is traced, each for one layer."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(SIZE), keras.layers.Dense(SIZE)
        self.parts = [optimizers.Adam(1e-2), optimizers.RMSprop(1e-2)]

    def call(self, inputs):
        return self.other(self.one(inputs))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x, training=True) - x) ** 2)
        for optimizer, layer in zip(self.parts, (self.one, self.other), strict=True):
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply(gradients, layer.trainable_variables)
        return {"loss": loss}


def test_optimizers_that_a_step_builds_are_made_in_parts(monkeypatch):
    # Only those that exist as a whole are divided afterwards.
    found, divided_later = [], []
    divide = placement.in_parts

    def noted(value, *others):
        divided_later.extend([value] if isinstance(value, np.ndarray) else [])
        return divide(value, *others)

    monkeypatch.setattr(placement, "in_parts", noted)
    for shard in (None, "optimizer"):
        keras.utils.set_random_seed(1)
        model = kmg.distribute(TwoOptimizers(), replicas_of(2), shard=shard)
        model.compile()
        losses = [model.train_on_batch(X, X[:, :1]) for _ in range(2)]
        states = [v for optimizer in model.parts for v in optimizer.variables]
        found.append([*losses, *(v.numpy() for v in (*model.variables, *states))])
    assert_equal(*found)
    assert sum(is_in_parts(variable_storage(v)) for v in states) == 3 and not divided_later


@needs_all
def test_loops_callbacks_and_other_steps_work_on_parts():
    def run(shard):
        keras.utils.set_random_seed(1)
        model = kmg.distribute(made(), replicas_of(2), shard=shard)
        model.compile(optimizers.SGD(1e-2, momentum=0.9), "mse")
        callbacks = [
            # The first multiplies velocities, the second reads new values, the third all copies.
            kmg.callbacks.LearningRateWarmup(epochs=2),
            kmg.callbacks.NaNGuard(),
            kmg.callbacks.ReplicaDriftCheck(),
        ]
        kinds = {"verbose": 0, "batch_size": 4}
        logs = model.fit(X, X[:, :1], epochs=3, shuffle=False, callbacks=callbacks, **kinds).history

        @kmg.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - x[:, :1]) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        results = [step(X), model.evaluate(X, X[:, :1], **kinds), model.predict(X, **kinds)]
        return model, [*logs["loss"], *results, *values(model)]

    model, sharded = run("optimizer")
    assert divided(model)
    assert_equal(sharded, run(None)[1])


@needs_all
@pytest.mark.parametrize("counts", [(2, 0), (0, 2), (2, 3), (4, 2), (2, 1)])
def test_a_checkpoint_resumes_with_and_without_sharding(counts, tmp_path):
    def fit(shards, epochs, callbacks):
        model = placed(bool(shards), shards or 2)
        # Adam makes more of rounding.
        exact = optimizers.Adam(1e-2) if 0 in counts else optimizers.SGD(1e-2, momentum=0.9)
        model.compile(exact, "mse")
        model.fit(X, X[:, :1], 4, epochs, verbose=0, shuffle=False, callbacks=callbacks)
        return model

    for shards, epochs in zip(counts, (1, 2), strict=True):
        resumed = fit(shards, epochs, [kmg.callbacks.ResumableCheckpoint(tmp_path)])
    for one, other in zip(values(resumed), values(fit(0, 2, [])), strict=True):
        rounding = {} if 0 in counts else {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(one, other, **rounding or {"rtol": 0})


@pytest.mark.parametrize("micro_batches", [1, pytest.param("auto", marks=needs_all)])
def test_a_step_that_fails_leaves_replicas_equal(micro_batches):
    """If it may run again, it also leaves nothing half done."""

    class Failing(optimizers.Adam):
        def update_step(self, gradient, variable, rate):
            if variable.shape == (SIZE, 1):
                bad = tf.debugging.Assert(self.iterations < 2, ["too late"])
                with tf.control_dependencies([bad]):
                    gradient = tf.identity(gradient)
            super().update_step(gradient, variable, rate)

    model = placed(True)
    model.compile(Failing(1e-2), "mse", micro_batches=micro_batches)
    for _ in range(2):
        model.train_on_batch(X, X[:, :1])
    before = values(model)
    copies = [copies_of(variable) for variable in model.weights]
    if micro_batches == 1:
        # As if the step had failed after this assignment.
        copies[0][0].assign_add(tf.ones_like(copies[0][0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too late"):
        model.train_on_batch(X, X[:, :1])
    for first, second in copies:
        np.testing.assert_array_equal(first, second)
    if micro_batches == "auto":
        assert_equal(values(model), before)
    else:
        assert not np.array_equal(copies[0][1], before[0])


@needs_all
def test_gradients_may_be_applied_outside_a_step():
    found = []
    for shards in (True, False):
        model, _ = trained(shards, optimizers.Adam(1e-2))
        gradients = [tf.ones(v.shape) for v in model.trainable_variables]
        model.optimizer.apply(gradients, model.trainable_variables)
        found.append(values(model))
    assert_equal(*found)


@needs_all
def test_replicas_of_a_loop_of_ones_own_are_refused():
    """Each would assign all parts."""
    model, _ = trained(True, optimizers.Adam(1e-2))
    (slot, *_) = [v for v in model.optimizer.variables if v.path in divided(model)]
    strategy = replicas_of(2)
    with pytest.raises(RuntimeError, match="is sharded"):
        strategy.run(lambda: slot.assign(tf.zeros(slot.shape)))
    # Distributed again without it, every replica has its copy.
    model = kmg.distribute(model, replicas_of(2))
    assert not divided(model)
