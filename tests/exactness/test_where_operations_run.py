"""A step on two GPUs waits for them about as often as a step on one, by TensorFlow's kernels.

See `gpu_audit`, which needs no GPU. On the way from one to two replicas no operation may lose its
kernel, and each replica may send to the host what one device sends, and two tensors more.
"""

import keras
import pytest
import tensorflow as tf
from helpers.all_replicas import first_rows

import keras_multigpu as kmg
from exactness.cases import CASES, Case
from exactness.gpu_audit import DEVICES, FIRST, HOST, Audit, as_on_gpus, audit
from exactness.test_every_application import FAMILIES
from exactness.test_every_application import trained as trained_family
from exactness.test_every_layer import BY_NAME, trained_layers

pytestmark = [
    pytest.mark.slow,
    # Keras says so of the output without a loss.
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
]

# Of the table, the rows with most operations of their own: conditions, loops, sums amid a step.
TELLING = ("mixed_float16, loss scaling", "BatchNorm, convnet", "masked words, LSTM")
# XLA's kernels are not TensorFlow's, and without a graph there is nothing to look at.
WITHOUT_GRAPH = {"jit_compile", "run_eagerly"}
# Layers that still do worse on two replicas.
LEFT = {
    **dict.fromkeys(
        ["AugMix", "RandAugment", "RandomPosterization"], "GPUs have no kernel for slices of uint8"
    ),
    "Equalization": "each of three histograms sends a count of its own to the host",
    "HashedCrossing": "GPUs have no kernel that pads int64, and gathered rows are padded",
    "TextVectorization": "one replica takes the step of strings, and joins them first",
}
ROWS = {
    case.name: case
    for case in sorted(CASES, key=lambda case: case.name not in TELLING)
    if case.name not in WITHOUT_GRAPH and case.kind == "mirrored"
}


def audits(case: Case, tmp_path) -> tuple[Audit, Audit]:
    """What a step of a case would do on one GPU, in plain Keras, and on two."""

    def train(model: keras.Model) -> None:
        batch_size, data = case.batch_size, case.data()
        arguments = {**case.fit(tmp_path), "epochs": 1, "verbose": 0, "shuffle": False}
        # CPUs, which are taken for GPUs, have kernels that end the process if a share is empty.
        rows = len(keras.tree.flatten(data[1])[0]) // batch_size * batch_size
        x, y, weight = keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[:rows], data
        )
        model.fit(x, y, sample_weight=weight, batch_size=batch_size, **arguments)

    with as_on_gpus():
        alone = audit(lambda: train(case.compiled()), reads_on_host=True)
        strategy = kmg.strategy("mirrored", devices=DEVICES)
        model = kmg.distribute(case.compiled(), strategy, self_check=False)
        return alone, audit(lambda: train(model))


def require_as_one(case: Case, tmp_path) -> None:
    one, two = audits(case, tmp_path)
    assert two.without_kernel.keys() <= one.without_kernel.keys() | one.on_host.keys()
    assert two.trips.total() <= 2 * one.trips.total() + 4, two.trips
    assert two.whole_numbers.total() <= 2 * one.whole_numbers.total()


def test_the_audit_finds_what_is_planted():
    """A shape made of what a GPU has counted, a text, an order, and an int32 variable."""
    with tf.device(FIRST):
        variable = tf.Variable(1, dtype=tf.int32)

    @tf.function(autograph=False)
    def step(rows):
        shape = tf.cast(tf.reduce_sum(tf.round(rows))[tf.newaxis], tf.int64)
        with tf.control_dependencies([rows]), tf.device(HOST):
            time = tf.timestamp()
        return tf.zeros(shape), tf.strings.as_string(rows), time, variable.read_value()

    with as_on_gpus():
        found = audit(lambda: step(tf.ones([3])))
    assert dict(found.without_kernel) == {"AsString of float32": 1}
    planted = {"_Arg -> AsString", "Cast -> Fill", "_Arg before Timestamp"}
    assert planted <= found.trips.keys()
    assert found.whole_numbers.total() == 1


@pytest.mark.parametrize("name", first_rows(ROWS, len(TELLING)))
def test_a_row_of_the_table(name, tmp_path):
    require_as_one(ROWS[name], tmp_path)


# The table has most kinds of operations.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=LEFT[name])) if name in LEFT else name
        for name in first_rows(BY_NAME)
    ],
)
def test_a_layer(name, tmp_path):
    require_as_one(trained_layers([(BY_NAME[name], name)]), tmp_path)


# The table has a small network of the same layers.
@pytest.mark.parametrize("name", first_rows(FAMILIES))
def test_a_family_of_applications(name, tmp_path):
    require_as_one(trained_family(name, "float32"), tmp_path)
