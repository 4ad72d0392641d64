"""How Keras recomputes layers, and why this package replaces it."""

import keras
import pytest
import tensorflow as tf

from keras_multigpu.keras_internals import remat_internals


class Layer(keras.layers.Layer):
    """Adds a loss."""

    def call(self, x, flag=None):
        self.add_loss(x)
        return x


def test_layers_use_the_remat_that_we_put_in_place(monkeypatch):
    """Keras still looks `remat` up, at each call, where `remat_internals` replaces it."""
    asked = []
    monkeypatch.setattr(remat_internals.operations, "remat", lambda f: asked.append(f) or f)
    with keras.RematScope(mode="full"):
        layer = Layer()
    layer(tf.constant(1.0))
    assert asked == [layer.call]


def test_the_remat_of_keras_takes_no_keywords():
    """Once it takes them, our `remat` only needs to check `in_step`."""
    function = remat_internals._of_keras(lambda x, flag: x)
    with pytest.raises(ValueError, match="keywords"):
        tf.function(lambda x: function(x, flag=True))(tf.constant(1.0))


def test_the_layer_and_precision_of_the_current_call_are_found():
    """Keras still keeps both under these names, and losses by their ids."""
    found = {}

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_float16")
            self.inner = Layer()

        def call(self, x):
            with keras.StatelessScope(collect_losses=True) as scope:
                self.inner(x)
            found.update(remat_internals.call_under_way())
            found["layer"] = remat_internals.adding_layer(scope.losses[0], None)
            return x

    outer = Outer()
    outer(tf.constant(1.0))
    assert found["current_call_ctx"].entry_layer is outer
    assert found["autocast_scope"].dtype == "float16"
    assert found["layer"] is outer.inner
    with remat_internals.in_call(found):
        assert remat_internals.call_under_way()["autocast_scope"].dtype == "float16"
    assert remat_internals.call_under_way()["autocast_scope"] is None
