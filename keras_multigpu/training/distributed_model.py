"""`DistributedModel`: a Keras model whose batch is shared by replicas."""

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import problem, runtime_error, value_error, warn
from keras_multigpu.keras_internals import compile_internals, dataset_internals, model_internals
from keras_multigpu.replicas import default_strategy
from keras_multigpu.training import fit_arguments, loops
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.loop_functions import loop_function, remake
from keras_multigpu.training.replication import (
    Replication,
    known_replication,
    replicate,
    replication_of,
    wants_xla,
)
from keras_multigpu.training.run import TrainingRun, pythonic
from keras_multigpu.training.shares import normalized
from keras_multigpu.training.steps.one_device import traces_one_device
from keras_multigpu.training.steps.request import Options
from keras_multigpu.training.workers import agreed_seed, require_same_call, together


class DistributedModel(keras.Model):
    """A Keras model that trains on N replicas exactly as on one device.

    `keras_multigpu.distribute` makes one of any model. You can also use it like `keras.Model`:
    `DistributedModel(inputs, outputs)`, or as a base class. Methods have the signatures and the
    results of `keras.Model`; `batch_size` is the global batch size. No `strategy.scope()` is
    needed.

    A subclass may override `train_step`, `test_step`, `predict_step`, `compute_loss` and
    `compute_metrics`, written for one device: they see the global batch, and their work is split
    over the replicas.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "DistributedModel":
        """Make a functional model where Keras would."""
        functional = len(args) == 2 or "outputs" in kwargs
        # Keras's `__init__` would change the bases of this class, and so all its later models.
        if functional and not issubclass(cls, model_internals.FunctionalModel):
            cls = distributed_class(model_internals.FunctionalModel, cls)
        model = super().__new__(cls, *args, **kwargs)
        # As in Keras, a model belongs to the strategy in whose scope it was made.
        if tf.distribute.has_strategy():
            replicate(model, Replication(tf.distribute.get_strategy()))
        return model

    training_run: TrainingRun
    """The progress of `fit` while it runs, for callbacks."""

    @property
    def distribute_strategy(self) -> tf.distribute.Strategy:
        """The strategy that the model runs under."""
        return replication_of(self).strategy

    def __repr__(self) -> str:
        """Keras's text, with the number of replicas once it is decided."""
        text: str = super().__repr__()
        known = known_replication(self)
        return text if known is None else f"{text[:-1]}, replicas={known.shares_of_batch}>"

    @property
    def jit_compile(self) -> bool:
        """Whether XLA compiles the steps; see `compile`."""
        # Keras resolves "auto" as for one device, when it is asked or compiled.
        known = known_replication(self)
        return bool(super().jit_compile) and (known is None or known.may_use_xla)

    @jit_compile.setter
    def jit_compile(self, value: bool | None) -> None:
        keras.Model.jit_compile.fset(self, value)
        replication = replication_of(self)
        replication.use(replication.options._replace(xla=value))

    def compile(self, *args: Any, micro_batches: int | str = 1, **kwargs: Any) -> None:
        """Configure the model for training, as `keras.Model.compile`.

        Args:
            *args: As in `keras.Model.compile`.
            micro_batches: The number of pieces in which each replica takes its share of a batch, to
                save memory. Gradients are still summed over the replicas once a step. `"auto"`
                starts with one and doubles it whenever memory runs out. Not saved with the model,
                because it depends on the machine.
            **kwargs: As in `keras.Model.compile`. `jit_compile="auto"` is as in Keras on one
                replica, and False on several and with `micro_batches`, where XLA would compile many
                programs.
        """
        if micro_batches != "auto" and not (isinstance(micro_batches, int) and micro_batches > 0):
            raise value_error(
                '`micro_batches` is neither a positive integer nor "auto".',
                'Expected 1, 2, 3, ... or "auto".',
                "Leave it out, or pass for example 4.",
                micro_batches=micro_batches,
            )
        model_internals.own_training_state(self)
        super().compile(*args, **kwargs)
        given = inspect.signature(keras.Model.compile).bind(self, *args, **kwargs).arguments
        xla = given.get("jit_compile", "auto")
        replication = replication_of(self)
        replication.use(
            replication.options._replace(
                micro_batches=micro_batches, xla=None if xla == "auto" else xla
            )
        )
        replication.forget_steps()

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile the model as it was when it was saved."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        replication = replication_of(self)
        replication.use(replication.options._replace(xla=wants_xla(self)))
        if self.built:
            replication.placement.prepare(self)
            replication.placement.build_optimizer(self.optimizer, self.trainable_variables)

    train_function = loop_function("train")
    test_function = loop_function("test")
    predict_function = loop_function("predict")

    def make_train_function(self, force: bool = False) -> Any:
        """Return the compiled training step; `force` has it compiled again, as in Keras."""
        return remake(self, "train", force)

    def make_test_function(self, force: bool = False) -> Any:
        """Return the compiled evaluation step; `force` has it compiled again."""
        return remake(self, "test", force)

    def make_predict_function(self, force: bool = False) -> Any:
        """Return the compiled prediction step; `force` has it compiled again."""
        return remake(self, "predict", force)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> keras.callbacks.History:
        """Train the model, as `keras.Model.fit`."""
        require_compiled(self)
        fit_arguments.require_of_fit(
            x,
            epochs,
            initial_epoch,
            validation_split,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
        )
        replication = replication_of(self)
        require_same_call(replication.group, "fit")
        if validation_split and validation_data is None:
            fit_arguments.require_tensors(x, y, sample_weight)
            (x, y, sample_weight), validation_data = dataset_internals.split_validation(
                (x, y, sample_weight), validation_split
            )
        class_weight = fit_arguments.weights_of_classes(class_weight, y, self)
        feed = Feed(
            replication.cutter,
            x,
            y,
            sample_weight,
            batch_size,
            steps_per_epoch,
            shuffle,
            class_weight,
            use="training",
            order_seed=agreed_seed(replication.group),
            epochs=epochs,
        )
        # Labels inside `x` are known only now.
        if class_weight is not None and feed.source.spec is not None:
            fit_arguments.require_one_class(class_weight, feed.source.spec[1], self)
        validation = None
        if validation_data is not None:
            arrays = keras.utils.unpack_x_y_sample_weight(validation_data)
            given = dict(zip(fit_arguments.PARTS, arrays, strict=True))
            fit_arguments.require_of_validation(given["x"], validation_freq, validation_batch_size)
            # `Batches` refuse a size, and a dataset would warn of it.
            batched = fit_arguments.comes_in_batches(given["x"])
            size = None if batched else validation_batch_size or batch_size
            given |= {"batch_size": size, "steps": validation_steps}
            validation = loops.Validation(validation_freq, **given)
        with one_thread(self, "fit"):
            try:
                return loops.train(
                    self, feed, validation, callbacks, verbose, epochs, initial_epoch
                )
            except KeyboardInterrupt as error:
                if error.args:  # A callback has saved the run, so the place does not matter.
                    error.__traceback__ = None
                raise

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Compute loss and metrics on a dataset, as `keras.Model.evaluate`."""
        require_compiled(self)
        validates = kwargs.pop(model_internals.VALIDATES, False)
        if kwargs:
            raise ValueError(f"Arguments not recognized: {kwargs}")
        feed = self.training_run.validation_feed if validates else None
        if feed is None:
            fit_arguments.require_sizes(x, batch_size=batch_size, steps=steps)
            replication = replication_of(self)
            require_same_call(replication.group, "evaluate")
            feed = Feed(replication.cutter, x, y, sample_weight, batch_size, steps)
        with one_thread(self, "evaluate"):
            logs = loops.evaluate(self, feed, callbacks, verbose)
        return logs if return_dict else compile_internals.flatten_metrics(self, logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Compute predictions, as `keras.Model.predict`: all of them, in input order.

        With `Batches` that have `on_error="skip"`, unreadable examples get rows of NaN.
        """
        fit_arguments.require_sizes(x, batch_size=batch_size, steps=steps)
        replication = replication_of(self)
        require_same_call(replication.group, "predict")
        feed = Feed(replication.cutter, x, None, None, batch_size, steps, use="prediction")
        return loops.predict(self, feed, callbacks, verbose)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Train on one global batch, which is split over the replicas."""
        require_compiled(self)
        if class_weight is not None:
            if sample_weight is not None:
                raise value_error(
                    "Both `sample_weight` and `class_weight` were given.",
                    "Expected one of them.",
                    "Multiply the class weights into `sample_weight`.",
                    class_weight=class_weight,
                )
            class_weight = fit_arguments.weights_of_classes(class_weight, y, self)
            sample_weight = dataset_internals.class_weights_of_labels(y, class_weight)
        logs = logs_of_batch(self, "train", x, y, sample_weight)
        return logs if return_dict else compile_internals.flatten_metrics(self, logs)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Evaluate one global batch, as `keras.Model.test_on_batch`."""
        require_compiled(self)
        logs = logs_of_batch(self, "test", x, y, sample_weight)
        return logs if return_dict else compile_internals.flatten_metrics(self, logs)

    def predict_on_batch(self, x: Any) -> Any:
        """Predict one global batch, as `keras.Model.predict_on_batch`."""
        replication = replication_of(self)
        with together(replication.group):
            outputs = replication.run_batch(self, "predict", normalized((x,)))
        return keras.tree.map_structure(loops.as_array, outputs)

    def export(
        self,
        filepath: Any,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: Any = None,
        **kwargs: Any,
    ) -> None:
        """Export the model to serve it, as `keras.Model.export`."""
        if format == "tf_saved_model" and (names := augment_when_exported(self)):
            warn(
                problem(
                    "The exported model augments, so it predicts other numbers than `predict`.",
                    "Expected layers that do nothing unless they are called with `training=True`.",
                    "Export an inner model without these layers, or augment in the pipeline.",
                    layers=names,
                )
            )
        super().export(filepath, format, verbose, input_signature, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle the model as Keras does; it comes back on the default strategy."""
        load, arguments = super().__reduce__()
        # Pickle cannot import a class that `distribute` has made.
        original = next(cls for cls in type(self).__mro__ if cls not in _made.values())
        options = replication_of(self).options
        return unpickled, (options, getattr(original, load.__name__), *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedModel":
        """Copy the model, onto the same strategy."""
        unpickle, arguments = self.__reduce__()
        model = unpickle(*arguments)
        replicate(model, Replication(self.distribute_strategy, replication_of(model).options))
        memo[id(self)] = model
        return model

    def train_step(self, data: Any) -> dict[str, Any]:
        """Run Keras's training step on a global batch, split over the replicas.

        A `train_step` of a subclass may call this: `fit` traces that method for one device, where
        this is Keras's own step, and splits all of it.
        """
        if traces_one_device():
            return super().train_step(data)
        return replication_of(self).run_keras_step(self, "train", super().train_step, data)

    def test_step(self, data: Any) -> dict[str, Any]:
        """Run Keras's evaluation step on a global batch, like `train_step`."""
        if traces_one_device():
            return super().test_step(data)
        return replication_of(self).run_keras_step(self, "test", super().test_step, data)


def logs_of_batch(
    model: DistributedModel, mode: str, x: Any, y: Any, sample_weight: Any
) -> dict[str, Any]:
    """Train ("train") or evaluate ("test") on one global batch."""
    # As in Keras: `data[0]` in a step of the user's is `x`, and not its first row.
    pack = keras.utils.pack_x_y_sample_weight
    batch = normalized((x, y, sample_weight) if y is None else pack(x, y, sample_weight))
    replication = replication_of(model)
    with one_thread(model, f"{mode}_on_batch"), together(replication.group):
        model.reset_metrics()
        return pythonic(replication.run_batch(model, mode, batch))


def augment_when_exported(model: keras.Model) -> list[str]:
    """The layers that act as in training if nobody says whether it is one, as in `export`."""
    usual = {
        layer: inspect.signature(layer.call).parameters.get("training")
        for layer in model_internals.layers_of(model)
    }
    # What the model says, all layers in it hear.
    if (own := usual[model]) is not None and own.default is False:
        return []
    return [layer.name for layer, given in usual.items() if given and given.default is True]


def require_compiled(model: keras.Model) -> None:
    """Raise Keras's error where `compile()` was not called."""
    if not model.compiled:
        raise ValueError("You must call `compile()` before using the model.")


_made: dict[tuple[type, type], type[DistributedModel]] = {}


def distributed_class(
    cls: type[keras.Model], base: type[DistributedModel] = DistributedModel
) -> type[DistributedModel]:
    """A `DistributedModel` that is also a `cls`, and is saved as one.

    Args:
        cls: The class of a Keras model.
        base: `DistributedModel` or a subclass, whose methods come before those of `cls`.
    """
    if issubclass(cls, base):
        return cls
    if (cls, base) not in _made:
        # The user's methods come first, so that overrides win and their `super()` finds ours.
        bases = (cls, base) if base is DistributedModel else (base, distributed_class(cls))
        named = cls if base is DistributedModel else base
        namespace = {"__module__": named.__module__, "__doc__": named.__doc__}
        metaclass: Any = type(cls)
        made = metaclass(named.__name__, (DistributedModel,), namespace)
        # Set only now, because it must not call the user's `__init_subclass__`.
        made.__bases__ = bases
        model_internals.register_like(made, named)
        _made[cls, base] = made
    return _made[cls, base]


def unpickled(options: Options, load: Any, *arguments: Any) -> DistributedModel:
    model = load(*arguments)
    model.__class__ = distributed_class(type(model))
    replicate(model, Replication(default_strategy(), options))
    return model


@contextlib.contextmanager
def one_thread(model: keras.Model, method: str) -> Iterator[None]:
    """Raise a `RuntimeError` if another thread is training or evaluating the model.

    In one thread, a callback may evaluate the model that is being trained.
    """
    # Not an attribute for Keras to track or save.
    lock = vars(model).setdefault("_used_by_one_thread", threading.RLock())
    if not lock.acquire(blocking=False):
        raise runtime_error(
            f"`{method}` was called while another thread trains or evaluates the same model.",
            "Expected one thread at a time: both would change its metrics, and mix them up.",
            "Wait for the other thread, or give each one a model: `copy.deepcopy(model)`. "
            "`kmg.train_separately` trains several at once.",
            thread=threading.current_thread().name,
        )
    try:
        yield
    finally:
        lock.release()
