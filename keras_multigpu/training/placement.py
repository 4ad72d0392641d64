"""Moves the variables of a model and its optimizers to a strategy, values kept.

Every variable that a training step changes lives once on each replica, with
`aggregation="none"`: in replica context an assignment is then local, needs no
`merge_call`, and works inside `cond`, `while` and XLA. The replicas stay equal because
each applies the same update to the same values.
"""

import contextlib

import keras
import tensorflow as tf

from keras_multigpu import keras_internals


def place_model(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Move a built model's variables to `strategy`; those already there stay.

    Metrics stay where they are: they are updated once, with the whole batch.
    """
    for optimizer in optimizers_of(model):
        keras_internals.optimizer_variable_keys(optimizer)
    place_variables(model.variables, strategy)
    place_metrics(model.metrics_variables)
    for optimizer in optimizers_of(model):
        keras_internals.set_optimizer_strategy(optimizer, strategy)
        place_variables(optimizer.variables, strategy)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer, others kept as attributes, and those they wrap."""
    found: dict[int, keras.optimizers.Optimizer] = {}

    def add(optimizer: object) -> None:
        if isinstance(optimizer, keras.optimizers.Optimizer) and id(optimizer) not in found:
            found[id(optimizer)] = optimizer
            add(getattr(optimizer, "inner_optimizer", None))
            for inner in getattr(optimizer, "optimizers", ()):
                add(inner)

    add(getattr(model, "optimizer", None))
    for value in vars(model).values():
        add(value)
    return list(found.values())


def build_optimizer(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Create the optimizer's variables for the model's trainable ones."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and model.trainable_variables:
        with strategy.scope():
            optimizer.build(model.trainable_variables)
        for part in optimizers_of(model):
            keras_internals.optimizer_variable_keys(part)
            place_variables(part.variables, strategy)


def place_variables(variables: list[keras.Variable], strategy: tf.distribute.Strategy) -> None:
    """Give each variable a storage under `strategy`, starting from its value."""
    for variable in variables:
        storage = keras_internals.variable_storage(variable)
        if storage is None or lives_under(storage, strategy):
            continue
        with tf.init_scope(), variable_scope(strategy):
            moved = tf.Variable(
                storage.numpy(),
                dtype=storage.dtype,
                trainable=variable.trainable,
                name=variable.name,
            )
        keras_internals.set_variable_storage(variable, moved)


def place_metrics(variables: list[keras.Variable]) -> None:
    """Undo the distribution of metric variables that were made inside a scope.

    Each metric is updated once a step with the global batch, so it needs one copy.
    """
    for variable in variables:
        storage = keras_internals.variable_storage(variable)
        if isinstance(storage, tf.distribute.DistributedValues):
            with tf.init_scope(), keras_internals.single_device():
                moved = tf.Variable(storage.numpy(), dtype=storage.dtype, name=variable.name)
            keras_internals.set_variable_storage(variable, moved)


def variable_scope(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[object]:
    """Where a new variable of this strategy is made."""
    if is_central_storage(strategy):
        return tf.device(strategy.extended.parameter_devices[0])
    return strategy.scope()


def lives_under(storage: tf.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Whether a variable is already where `place_variables` would put it."""
    if isinstance(storage, tf.distribute.DistributedValues):
        return storage.distribute_strategy is strategy
    if is_central_storage(strategy):
        return storage.device == canonical(strategy.extended.parameter_devices[0])
    return storage.device == strategy.extended.worker_devices[0] and (
        strategy.num_replicas_in_sync == 1
    )


def canonical(device: str) -> str:
    """A device's full name, as variables report it."""
    with tf.device(device):
        return tf.zeros(()).device


def is_central_storage(strategy: tf.distribute.Strategy) -> bool:
    """Whether variables live once and not on every replica."""
    return isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)


def copies(storage: tf.Variable, strategy: tf.distribute.Strategy) -> tuple[tf.Variable, ...]:
    """A variable's copies, one for each replica of this process (or a single shared one)."""
    return tuple(strategy.experimental_local_results(storage))
