"""What `fit` refuses and warns about."""

import keras
import pytest

from contract.pairs import X, Y, assert_close, dataset

MISTAKES = [
    ("unequal lengths", lambda model: model.fit(X, Y[:-1])),
    ("no data", lambda model: model.fit()),
    ("empty dataset", lambda model: model.fit(dataset().take(0))),
    ("empty generator", lambda model: model.fit(iter([]))),
    ("nothing to evaluate", lambda model: model.evaluate(dataset().take(0))),
    ("nothing to predict", lambda model: model.predict(dataset().take(0))),
]


@pytest.mark.parametrize("mistake", [pytest.param(call, id=name) for name, call in MISTAKES])
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
