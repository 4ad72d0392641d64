"""`shard="optimizer"`: replicas divide the optimizer's state, and no number changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from helpers.cpu_replicas import replicas_of
from helpers.one_device import assert_close, assert_equal

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
    ),
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


def parts(variable):
    return parts_or_copies(variable_storage(variable))


def divided(model):
    return [v.path for v in model.optimizer.variables if is_in_parts(variable_storage(v))]


BY_NORMS = ("Lamb", "Muon")
"""These need sums over a whole weight, of which each replica has its part."""


ROWS = [("conditions", 2, {}), ("amsgrad", 2, {"micro_batches": 2})]
if ALL_REPLICAS:
    ROWS += [(name, count, {}) for name in OPTIMIZERS for count in (2, 3, 4)]


@pytest.mark.parametrize(("name", "count", "options"), ROWS)
def test_sharding_changes_no_bit(name, count, options):
    optimizer = OPTIMIZERS[name]
    model, sharded = trained(True, optimizer(), count, **options)
    whole = trained(False, optimizer(), count, **options)[1]
    rounding = {"rtol": 2e-5, "atol": 1e-6} if name in BY_NORMS else {"rtol": 0, "atol": 0}
    assert_close(sharded, whole, **rounding)
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


def test_a_checkpoint_resumes_on_other_replicas(tmp_path):
    def fit(count, epochs, callbacks):
        model = placed(count > 1, count)
        model.compile(optimizers.SGD(1e-2, momentum=0.9), "mse")
        model.fit(X, X[:, :1], 4, epochs, verbose=0, shuffle=False, callbacks=callbacks)
        return model

    for count, epochs in ((3, 1), (2, 2)):
        resumed = fit(count, epochs, [kmg.callbacks.ResumableCheckpoint(tmp_path)])
    assert_close(values(resumed), values(fit(1, 2, [])), rtol=1e-4, atol=1e-5)


def test_a_step_that_fails_leaves_replicas_equal():
    class Failing(optimizers.Adam):
        def update_step(self, gradient, variable, rate):
            if variable.shape == (SIZE, 1):
                bad = tf.debugging.Assert(self.iterations < 2, ["too late"])
                with tf.control_dependencies([bad]):
                    gradient = tf.identity(gradient)
            super().update_step(gradient, variable, rate)

    model = placed(True)
    model.compile(Failing(1e-2), "mse")
    for _ in range(2):
        model.train_on_batch(X, X[:, :1])
    before = model.get_weights()[0]
    copies = [copies_of(variable) for variable in model.weights]
    # As if the step had failed after this assignment.
    copies[0][0].assign_add(tf.ones_like(copies[0][0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too late"):
        model.train_on_batch(X, X[:, :1])
    for first, second in copies:
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(copies[0][1], before)
