"""Changing any argument of any class of Keras or `kmg.augmentation` changes the identity.

Otherwise a changed run would continue without a warning. `HARMLESS` lists the exceptions.
"""

import inspect
import json
from fnmatch import fnmatch

import keras
import numpy as np
import pytest
from helpers.all_replicas import ALL_REPLICAS

import keras_multigpu as kmg
from keras_multigpu.identities import identify_layer, identity_of
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.training.variables.model_state import identity_of_optimizer
from keras_multigpu.training.variables.placement import with_inner

layers, optimizers = keras.layers, keras.optimizers

HARMLESS = {
    "Keras numbers names; those of two runs of one script may differ.": ["*.name"],
    "A checkpoint restores generators; `Batches` have seeds of their own.": ["*.seed"],
    "A checkpoint restores the weights.": ["*_initializer", "*.weights"],
    "`rates_of` compares it: the script's value wins, and a line says so.": ["*.learning_rate"],
    "Keras accepts a single value.": ["IntegerLookup.vocabulary_dtype"],
    "Keras accepts it and ignores it.": [
        "*Embedding.autocast",
        "GroupNormalization.autocast",
        "HashedCrossing.activity_regularizer",
        "HashedCrossing.autocast",
        "HashedCrossing.trainable",
        "InputLayer.activity_regularizer",
        "InputLayer.autocast",
        "InputLayer.trainable",
        "LayerNormalization.autocast",
        "*Lookup.dtype",
        "*Lookup.trainable",
        "SimpleRNN.activity_regularizer",
    ],
}
"""Patterns of arguments that need not change the identity, by the reason."""

NOT_MADE = {
    **dict.fromkeys(["FlaxLayer", "JaxLayer", "TorchModuleWrapper"], "It is for other backends."),
    "TFSMLayer": "It needs a SavedModel, whose weights become its own.",
}


def scaled(factor):
    return lambda *x: x[0] * factor


class Scaled:
    """Has the same name for every number, and no configuration."""

    def __init__(self, factor):
        self._factor = factor

    def __call__(self, x):
        return x * self._factor


class Cell(layers.Layer):
    """A layer that can be a cell of a recurrent layer."""

    def __init__(self, function):
        super().__init__()
        self.state_size = self.output_size = 3
        self.of_user = function

    def call(self, x, states, training=False):
        return self.of_user(x), states


OfKerasCV = type("OfKerasCV", (layers.RandomBrightness,), {"__module__": "keras_cv.layers"})

SGD = optimizers.SGD(0.1)

PAIRS = [(scaled(2), scaled(3)), (Scaled(2), Scaled(3))]
"""Pairs with equal names, where Keras's configuration keeps only the name."""

FUNCTIONS = (
    "optimizer_map",
    "*activation",
    "*regularizer",
    "*constraint",
    "fn",
    "function",
    "mask",
    "standardize",
    "output_shape",
)
"""Patterns of arguments that take functions."""

BASES = {
    "Activation": [{"activation": "relu"}],
    "AUC": [{}, {"multi_label": True, "num_labels": 3}],
    "Adaptive*Pooling?D": [{"output_size": 2}],
    "Bidirectional": [{"layer": layers.LSTM(3)}],
    "CategoryEncoding": [{"num_tokens": 5}],
    "Conv?DTranspose": [{}, {"strides": 3}],
    "Discretization": [
        {"bin_boundaries": [1.0, 2.0]},
        {"num_bins": 3, "output_mode": "multi_hot"},
    ],
    "Dot": [{"axes": 1}],
    "InputLayer": [{"shape": (3,)}, {"batch_shape": (2, 3)}, {"input_tensor": keras.Input((5,))}],
    "MaxNumBoundingBoxes": [{"max_number": 2}],
    "Normalization": [{}, {"mean": 1.0, "variance": 2.0}],
    "Optimizer": [{"learning_rate": 0.1}],
    "RandomPosterization": [{"factor": 3}],
    "RNN": [{"cell": layers.LSTMCell(3)}, {"cell": Cell(scaled(2))}],
    "IntegerLookup": [
        {},
        {"output_mode": "tf_idf", "vocabulary": [3, 4], "idf_weights": [0.1, 0.2]},
        {"num_oov_indices": 2, "oov_method": "farmhash"},
        {"output_mode": "multi_hot", "max_tokens": 4},
    ],
    "KerasCVLayer": [{"layer": OfKerasCV(0.1)}],
    "StringLookup|TextVectorization": [
        {},
        {"output_mode": "tf_idf", "vocabulary": ["a", "b"], "idf_weights": [0.1, 0.2]},
        {"output_mode": "multi_hot", "max_tokens": 4},
    ],
    "Hashing": [{"num_bins": 4}, {"num_bins": 4, "output_mode": "multi_hot"}],
}
"""By patterns of class names: arguments that a class needs, or that only work together."""

NEEDED = {
    "alpha": 0.5,
    "boundaries": [1, 2],
    "cell": layers.LSTMCell(3),
    "cells": [layers.LSTMCell(3)],
    "equation": "ab,bc->ac",
    "function": scaled(2),
    "fn": scaled(2),
    "layer": layers.Dense(3),
    "layers": [layers.RandomRotation(0.1)],
    "inner_optimizer": SGD,
    "optimizer_map": {"a": SGD},
    "target_shape": (6,),
    "target_class_ids": [1],
    "values": [1.0, 2.0, 3.0],
    "dims": (2, 1),
    "dtype": "float32",
}
"""Values of required arguments by name; any other is a half or two."""

OTHERS = {
    "activity_regularizer": ["l2"],
    "average": ["macro"],
    "axes": [2],
    "backward_layer": [layers.LSTM(3, "relu", go_backwards=True)],
    "batch_shape": [(3, 3)],
    "cell": [layers.LSTMCell(4), Cell(scaled(3))],
    "cells": [[layers.LSTMCell(4)]],
    "class_aggregation": ["variance_weighted_average"],
    "curve": ["PR"],
    "cropping": [3],
    "dtype": ["float16", "int32"],
    "equation": ["ab,bc->bc"],
    "dims": [(1, 2)],
    "fft_length": [512],
    "fill_value": ["random", 0.5],
    "flip": ["vertical"],
    "idf_weights": [[0.3, 0.4]],
    "inner_optimizer": [optimizers.SGD(0.1, momentum=0.5)],
    "input_tensor": [keras.Input((4,))],
    "kernel_size": [3, 5],
    "layer": [OfKerasCV(0.2), layers.LSTM(4), layers.Dense(4)],
    "layers": [[layers.RandomRotation(0.2)]],
    "mode": ["columns", "fan_out", "angle"],
    "output_mode": ["one_hot", "multi_hot"],
    "optimizer_map": [{"b": SGD}, {"a": optimizers.SGD(momentum=0.5)}],
    "output_padding": [1],
    "oov_method": ["farmhash", "floormod"],
    "padding": ["same", 3],
    "salt": [133, [1, 2]],
    "score_mode": ["concat"],
    "scaling": ["spectrum"],
    "side": ["imag"],
    "split": ["character"],
    "use_cudnn": [True],
    "vocabulary": [[5, 6], ["c", "d"]],
    "window": ["hamming"],
}
"""Values to change an argument to, by name; for any other, its type decides."""

WORDS = (
    "area bilinear channels_first channels_last constant count fan_in float32 horizontal int32 "
    "l2 linear lower macro max mean mish none nearest normal relu same sum uniform wrap xyxy "
    "ROC minoring interpolation zeros"
).split()


def offered():
    """The public classes of Keras and of our augmentation that have arguments."""
    modules = {
        keras.losses: keras.losses.Loss,
        keras.metrics: keras.metrics.Metric,
        optimizers: optimizers.Optimizer,
        optimizers.schedules: optimizers.schedules.LearningRateSchedule,
        layers: keras.Layer,
        keras.regularizers: keras.Regularizer,
        keras.constraints: keras.constraints.Constraint,
        keras.initializers: keras.Initializer,
        kmg.augmentation: keras.Layer,
    }
    found = {
        kind: kind
        for module, root in modules.items()
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, root)
    }
    return [kind for kind in found if kind.__name__ not in NOT_MADE]


def arguments_of(kind):
    """The arguments of a class with their defaults, and those that every layer has."""
    parameters = inspect.signature(kind).parameters.values()
    named = {
        p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    extra = {"trainable": True, "dtype": None, "activity_regularizer": None, "autocast": True}
    takes_more = issubclass(kind, keras.Layer) and len(named) < len(parameters)
    return named, {k: v for k, v in extra.items() if takes_more and k not in named}


def bases_of(kind, named):
    """Sets of arguments that make an object of this class."""
    given = [
        bases
        for names, bases in BASES.items()
        for n in names.split("|")
        if fnmatch(kind.__name__, n)
    ]
    needed = [name for name, default in named.items() if default is inspect.Parameter.empty]
    with_numbers = [
        [{**{n: NEEDED.get(n, number) for n in needed}, **base} for base in (given or [[{}]])[0]]
        for number in (2, 0.5)
    ]
    # Some arguments are fractions below one, others are integers.
    return with_numbers[identity_with(kind, **with_numbers[0][0]) is None]


def others(name, value):
    """Other values that an argument might take."""
    if name in OTHERS:
        return OTHERS[name]
    if any(fnmatch(name, pattern) for pattern in FUNCTIONS):
        return [PAIRS[0][1], *WORDS]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, value * 2, value / 2, value + 0.1, -0.1]
    if isinstance(value, (tuple, list)):
        return [type(value)(np.multiply(value, factor).tolist()) for factor in (2, 0.5)]
    return (
        WORDS if isinstance(value, str) else [2, 0.5, True, (1, 2), [0.5, 0.7], np.ones(3), *WORDS]
    )


def identity_with(kind, **arguments):
    """The identity in a checkpoint; None if the class does not accept these values."""
    try:
        made = kind(**arguments)
    except Exception:
        return None
    if isinstance(made, keras.Layer):
        parts = [identify_layer(part) for part in model_internals.layers_of(made)]
    elif isinstance(made, optimizers.Optimizer):
        parts = [identity_of_optimizer(part) for part in with_inner(made)]
    else:
        parts = identity_of(made)
    return json.dumps(parts)


def is_shown(kind, name, base, before, values):
    """Whether another value changes the identity; None if none of these is accepted."""
    taken = None
    for value in values:
        identity = identity_with(kind, **{**base, name: value})
        if identity is not None:
            taken = identity != before
        if taken:
            return True
    return taken


def names_of_functions_suffice(kind, name, base):
    """Whether a function's name is all that the identity depends on."""
    if not any(fnmatch(name, pattern) for pattern in FUNCTIONS):
        return False
    pairs = [[identity_with(kind, **{**base, name: each}) for each in pair] for pair in PAIRS]
    return any(one is not None and one == other for one, other in pairs)


def label(kind):
    return f"{kind.__module__.split('.')[2]}.{kind.__name__}"


@pytest.mark.slow
# All classes are identified in the same way, so `make test` tries every ninth.
@pytest.mark.parametrize("kind", offered()[:: 1 if ALL_REPLICAS else 9], ids=label)
def test_changing_any_argument_changes_the_identity(kind):
    """Unless the argument is listed as harmless. A new class in Keras may need a line above."""
    named, of_all = arguments_of(kind)
    bases = [(base, identity_with(kind, **base)) for base in bases_of(kind, named)]
    hidden, untried = [], []
    for base, before in bases:
        assert before is not None, "`BASES` lacks arguments that make an object of this class."
        assert before == identity_with(kind, **base), "Two equal objects differ."
    for name, default in {**named, **of_all}.items():
        if any(fnmatch(f"{kind.__name__}.{name}", each) for each in sum(HARMLESS.values(), [])):
            continue
        shown = [
            is_shown(kind, name, base, before, others(name, base.get(name, default)))
            for base, before in bases
        ]
        by_name = any(names_of_functions_suffice(kind, name, base) for base, _ in bases)
        hidden += [name] if False in shown or by_name else []
        untried += [name] if name in named and {*shown} == {None} else []
    assert (hidden, untried) == ([], [])
