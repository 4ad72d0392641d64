"""`distribute`: turns a Keras model into a `DistributedModel`."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_multigpu.checks import require_choice, value_error
from keras_multigpu.replicas import default_strategy, strategy_of
from keras_multigpu.training.distributed_model import DistributedModel, distributed_class
from keras_multigpu.training.replication import (
    Replication,
    known_replication,
    replicate,
    require_strategy_or_devices,
    wants_xla,
)
from keras_multigpu.training.steps.request import Options
from keras_multigpu.training.variables.placement import gather, optimizers_of
from keras_multigpu.training.workers import while_all_live


def distribute(
    model: keras.Model,
    strategy: tf.distribute.Strategy | keras.distribution.DataParallel | None = None,
    *,
    devices: Sequence[str] | int | None = None,
    asynchronous: bool = False,
    on_inexact: str = "one_device",
    self_check: bool = True,
    shard: str | None = None,
) -> DistributedModel:
    """Distribute a Keras model over the replicas of a strategy.

    Changes the model in place and returns it, with its layers, weights, optimizer state, losses and
    metrics. The model may be Sequential, functional or subclassed, built or not, compiled or not,
    made inside a scope or outside. A second call moves it to another strategy.

    Args:
        model: The model.
        strategy: A strategy, or Keras's own `DataParallel`. By default the one in whose scope the
            model was made, else that of `keras.distribution.set_distribution`, else the last one
            that `keras_multigpu.strategy` returned, else what that chooses by itself.
        devices: Instead of a strategy: device names, or how many, as for `keras_multigpu.strategy`.
        asynchronous: With parameter servers, workers take whole batches without waiting for each
            other, so training no longer equals one device.
        on_inexact: What to do if the self-check finds that results would differ from one device,
            which is a bug in this package: "one_device" gives each batch to one replica, with a
            warning; "error" raises.
        self_check: Whether to try each training step on a few examples of its first batch, split
            and unsplit, before it runs. The trial leaves no trace.
        shard: What the replicas divide among them, to save memory. With "optimizer" each has its
            rows of the optimizer's state, and gives the others its rows of the new weights. With
            "weights" each has its rows of the weights as well: these are gathered before each use,
            bucket after bucket, so that no device ever holds the whole model.

    Returns:
        The model, now a `DistributedModel`.

    Example:

    ```python
    model = keras.applications.EfficientNetV2B0(weights=None, classes=10)
    model = kmg.distribute(model)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    ```
    """
    if not isinstance(model, keras.Model):
        raise value_error(
            "`model` is not a model of Keras 3.",
            "Expected a `keras.Model`: Sequential, functional or subclassed.",
            "Build it with `import keras`, for example `keras.Sequential([...])`. `tf_keras` is "
            "another Keras, and so is `tf.keras` with TF_USE_LEGACY_KERAS in the environment.",
            model=model,
        )
    if isinstance(strategy, keras.distribution.DataParallel | keras.distribution.ModelParallel):
        strategy = strategy_of(strategy)
    require_strategy_or_devices(strategy, devices)
    require_choice("on_inexact", on_inexact, ("one_device", "error"))
    require_choice("shard", shard, (None, "optimizer", "weights"))
    # Not `replication_of`, which would choose the default strategy.
    previous = known_replication(model)
    if previous is None and devices is None and not tf.distribute.has_strategy():
        made_in = model.distribute_strategy
        # Outside of all scopes it is TensorFlow's default strategy.
        if made_in is not tf.distribute.get_strategy():
            strategy = strategy or made_in
    strategy = strategy or default_strategy(devices)
    compiled = previous.options if previous is not None else Options(xla=wants_xla(model))
    options = compiled._replace(on_inexact=on_inexact, self_check=self_check, shard=shard)
    replication = Replication(strategy, options, asynchronous=asynchronous)
    # Not a new model around it: callbacks, and layers that keep their model, hold this object.
    model.__class__ = distributed_class(type(model))
    replicate(model, replication)
    if shard is None:
        gather([v for optimizer in optimizers_of(model) for v in optimizer.variables])
    if shard != "weights":
        gather(model.variables)
    if model.built:
        with while_all_live(replication.group):
            replication.placement.prepare(model)
    return model
