"""What `fit` refuses and warns about."""

import keras
import pytest
from exactness import models as made
from helpers.cpu_replicas import on_replicas

import keras_multigpu as kmg
from contract.pairs import KINDS, WEIGHTS, X, Y, assert_close, dataset, endless

MISTAKES = [
    ("not compiled", lambda model: on_replicas(made.mlp(), 2).fit(X, Y)),
    ("unequal lengths", lambda model: model.fit(X, Y[:-1])),
    ("no data", lambda model: model.fit()),
    ("empty dataset", lambda model: model.fit(dataset().take(0))),
    ("empty generator", lambda model: model.fit(iter([]))),
    ("nothing to evaluate", lambda model: model.evaluate(dataset().take(0))),
    ("nothing to predict", lambda model: model.predict(dataset().take(0))),
    ("targets beside a dataset", lambda model: model.fit(dataset(), Y)),
    ("targets beside a generator", lambda model: model.fit(endless(), Y)),
    ("split of a dataset", lambda model: model.fit(dataset(), validation_split=0.2)),
    ("odd frequency", lambda model: model.fit(X, Y, validation_data=(X, Y), validation_freq="x")),
    ("unknown argument", lambda model: model.evaluate(X, Y, unknown=1)),
    (
        "two kinds of weights",
        lambda model: model.train_on_batch(X, KINDS, WEIGHTS, class_weight={0: 1, 1: 1, 2: 1}),
    ),
    (
        "no micro-batches",
        lambda model: kmg.distribute(made.mlp()).compile("sgd", "mse", micro_batches=0),
    ),
    ("no model", lambda model: kmg.distribute("mlp")),
    ("no strategy", lambda model: kmg.distribute(made.mlp(), "two GPUs")),
]


@pytest.mark.parametrize("mistake", [pytest.param(call, id=name) for name, call in MISTAKES])
@pytest.mark.in_test_all("the others are found by Keras alike", after=6)
@pytest.mark.slow
def test_mistakes_are_value_errors(pairs, mistake):
    _, model = pairs()
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"\S+"):
        mistake(model)
    assert_close(before, model.get_weights())


@pytest.mark.slow
def test_limits_in_keras_config_are_applied_with_a_warning(pairs):
    """`max_epochs` and `max_steps_per_epoch`, with Keras's own warnings."""
    _, model = pairs()
    keras.config.set_max_epochs(1)
    keras.config.set_max_steps_per_epoch(2)
    try:
        with pytest.warns() as said:
            model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
            model.fit(X, Y, steps_per_epoch=2, verbose=0)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    limits = ["Limiting steps_per_epoch to 2", "Limiting epochs to 1"]
    assert [(str(each.message), each.filename) for each in said] == [
        (limit, __file__) for limit in limits
    ]
    assert model.optimizer.iterations == 4
