"""The same model in plain Keras and on 2 replicas, and the data that it trains on."""

import itertools

import keras
import numpy as np
import tensorflow as tf
from exactness import models as made
from exactness.runs import difference
from helpers.cpu_replicas import on_replicas
from helpers.keras_versions import ADDS_UP_BATCHES
from keras import layers

X, Y, _ = made.regression(29)
WEIGHTS = made.weighted(29)[2]

KINDS = made.classes(29)[1]

BATCH = 8

BATCHES = [(X[start : start + BATCH], Y[start : start + BATCH]) for start in range(0, 29, BATCH)]

SIGNATURE = tuple(tf.TensorSpec((None, part.shape[1])) for part in BATCHES[0])


def compiled(model=made.mlp, **options):
    """A compiled model, always with the same first weights."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    model = model()
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **options})
    return model


def variables_of(model):
    return model.weights + (model.optimizer.variables if model.optimizer else [])


def trained(model, *batch, **options):
    """What `train_on_batch` returns of a batch alone."""
    if ADDS_UP_BATCHES:
        model.reset_metrics()
    return model.train_on_batch(*batch, **options)


def evaluated(model, *batch, **options):
    """The same for `test_on_batch`."""
    if ADDS_UP_BATCHES:
        model.reset_metrics()
    return model.test_on_batch(*batch, **options)


def assert_close(expected, found):
    keras.tree.assert_same_structure(expected, found)
    for one, other in zip(keras.tree.flatten(expected), keras.tree.flatten(found), strict=True):
        assert type(one) is type(other) or ADDS_UP_BATCHES
        if isinstance(one, str) or one is None:
            assert one == other
        else:
            assert difference(np.asarray(one), np.asarray(other)) < 2e-5


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays or (X, Y)).batch(BATCH)


class Batched(keras.utils.PyDataset):
    """Batches of 8 as a `PyDataset`, which reverses them after each epoch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.batches = list(BATCHES)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]

    def on_epoch_end(self):
        self.batches.reverse()


def endless(batches=BATCHES):
    yield from itertools.cycle(batches)


class Squares(keras.Model):
    """A model of the user's own that Keras can build from a batch only."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x):
        return self.out(x)


def reads_sparse():
    return keras.Sequential([keras.Input((5,), sparse=True), layers.Dense(1)])


class Pairs:
    """Gives out models twice, each time as new: plain Keras, and on 2 replicas.

    Their steps are compiled once for all tests of a module.
    """

    def __init__(self):
        self.kept = {}

    def __call__(self, model=made.mlp, **options):
        key = model, repr(options)
        if key not in self.kept:
            one, other = compiled(model, **options), compiled(model, **options)
            # To make a graph pays off for the model that most tests train.
            one.run_eagerly |= model is not made.mlp
            if not one.built:
                return one, on_replicas(other, 2)
            for each in (one, other):
                if each.optimizer is not None:
                    each.optimizer.build(each.trainable_variables)
            start = [variable.numpy() for variable in variables_of(one)]
            self.kept[key] = one, on_replicas(other, 2), start
        *pair, start = self.kept[key]
        for one in pair:
            one.stop_training = False
            for variable, value in zip(variables_of(one), start, strict=True):
                variable.assign(value)
        return pair

    def assert_same_fit(self, arguments, model=made.mlp, **options):
        """`fit` ends with the same weights and the same history."""
        one, two = self(model, **options)
        histories = []
        for model in (one, two):
            keras.utils.set_random_seed(2)
            histories.append(model.fit(**{"verbose": 0, "shuffle": False, **arguments()}).history)
        assert_close(*histories)
        assert_close(one.get_weights(), two.get_weights())
        return histories[1]
