"""The loss of a whole batch and its gradients: a line of two weights, by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_multigpu.training.replica_pass.pure_model import PureModel, Values, loss_trackers

import keras_multigpu as kmg
from keras_multigpu.training.steps import whole_batch_step as whole_batch


def squared_mean(y, y_pred):
    """A loss that is not a sum over examples."""
    return tf.square(tf.reduce_mean(y_pred - y))


def dense(**settings):
    return keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", **settings)


def penalised():
    """One output; the kernel, 1, has a penalty of k * k."""
    return keras.Sequential([keras.Input((1,)), dense(kernel_regularizer=keras.regularizers.L2(1))])


def whole_loss(model, predictions, targets, added=(), scale=1.0, loss=squared_mean):
    """The loss of a model, on one device, for these predictions."""
    model = kmg.distribute(model, devices=1)
    model.compile("sgd", loss)
    y, y_pred = (
        keras.tree.map_structure(lambda numbers: numbers[:, None], part)
        for part in (targets, predictions)
    )
    model.compute_loss(None, y, y_pred)  # Makes the loss's variables.
    pure = PureModel(model, model.replication.placement, in_parts=True)
    values = Values(
        [tf.convert_to_tensor(v) for v in pure.variables.trainable],
        [tf.convert_to_tensor(v) for v in pure.variables.others],
        tf.convert_to_tensor(pure.variables.global_seed),
    )
    attached = [None] * 2 * len(keras.tree.flatten(y_pred))
    whole = whole_batch.WholeLoss(pure, (None, y, None), values, (y_pred, attached), list(added))
    whole.compute(tf.constant(scale))
    return whole


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_loss_and_all_its_gradients(scale):
    """Predictions miss by 1, 2 and 6: mean 3, squared 9, and 1 for the kernel and 4 as added.

    The square's slope is 6, of which each of three predictions has a third; the penalty's is 2.
    """
    predictions, targets = tf.constant([2.0, 3.0, 7.0]), tf.ones(3)
    whole = whole_loss(penalised(), predictions, targets, [tf.constant(4.0)], scale)
    assert float(whole.loss) == 14
    (of_predictions,) = whole.of_predictions
    np.testing.assert_allclose(of_predictions, [[2 * scale]] * 3, rtol=1e-6)
    assert [float(gradient) for gradient in whole.of_added] == [scale]
    assert [gradient.numpy().tolist() for gradient in whole.of_trainable] == [[[2 * scale]]]


def test_predictions_that_a_loss_ignores_have_no_gradient():
    """And no weight has one by way of them."""

    def sum_of_targets(y, y_pred):
        return tf.reduce_sum(y)

    whole = whole_loss(penalised(), tf.ones(2), tf.constant([3.0, 4.0]), loss=sum_of_targets)
    assert float(whole.loss) == 7 + 1
    assert whole.of_predictions == [None]


def test_the_means_of_single_losses_have_those_of_the_whole_batch():
    """Two outputs with losses of 4 and 49, each counted for two examples; nothing is assigned."""
    inputs = keras.Input((1,))
    model = keras.Model(inputs, [dense()(inputs), dense()(inputs)])
    predictions = [tf.constant([1.0, 3.0]), tf.constant([6.0, 8.0])]
    whole = whole_loss(model, predictions, [tf.zeros(2), tf.zeros(2)], loss=[squared_mean] * 2)
    assert float(whole.loss) == 53
    # What was there from making them, and as much again.
    assert [float(tracker) for tracker in whole.trackers] == [2 * n for n in (8, 2, 98, 2)]
    assert [float(each) for each in loss_trackers(model)] == [8, 2, 98, 2]


def test_gradients_become_dense():
    """None where there is none, and rows of a table in their places; ragged ones stay ragged."""
    ragged = tf.ragged.constant([[1.0], []])
    rows = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([1, 1]), tf.constant([2, 1]))
    first, second, *others = whole_batch.dense([ragged, None, rows, tf.constant([5.0])])
    assert (first is ragged, second) == (True, None)
    assert [each.numpy().tolist() for each in others] == [[[0], [7]], [5]]


@pytest.mark.parametrize(
    ("through_model", "direct", "expected"),
    [([1.0, 2.0], None, [1, 2]), (None, [4.0, 8.0], [1, 2]), ([1.0, 2.0], [4.0, 8.0], [2, 4])],
)
def test_a_replica_adds_its_fraction_of_what_all_have(through_model, direct, expected):
    """A quarter of the direct part, which is equal on all replicas."""
    parts = [None if part is None else tf.constant(part) for part in (through_model, direct)]
    assert whole_batch.total(*parts, tf.constant(0.25)).numpy().tolist() == expected


def test_a_variable_without_any_gradient_has_none():
    """The loss does not depend on it."""
    assert whole_batch.total(None, None, tf.constant(0.25)) is None


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.slow
def test_weights_that_a_loss_does_not_depend_on_stay_as_they_are():
    """In Keras too they are not even decayed."""

    class OneHead(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean((y_pred[0] - y) ** 2)

    x = keras.Input((1,))
    heads = [keras.layers.Dense(1, kernel_initializer="ones")(x) for _ in range(2)]
    model = kmg.distribute(OneHead(x, heads), devices=2)
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    model.train_on_batch(np.ones((3, 1)), np.zeros((3, 1)))
    first, _, second, _ = model.get_weights()
    assert first[0, 0] < 0.95 and second[0, 0] == 1
