"""The table: small trainings that N replicas must run exactly as one device does.

A row names a model, what it is compiled with, its data and the arguments of `fit`.
`test_replicas_agree.py` runs it on N replicas, and
`benchmarks/parity_vs_stock.py` on stock Keras as well. Whatever holds state (optimizers,
losses, callbacks) is made anew for each run, hence the lambdas.

Unless a row says otherwise there are 15 examples in batches of 8, so that the last batch is
smaller, divides evenly on no number of replicas, and is too small for 8 of them.

A row runs on one number of replicas, in turn, and most in batches of 7. What `ELSEWHERE` names does
not run. With the environment variable `KMG_ALL_REPLICAS=1` (`make test-all`) every row runs on 2,
3, 4 and 8, as it stands, and with 29 examples.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
from helpers.all_replicas import ALL_REPLICAS
from keras import callbacks, layers, losses, metrics, optimizers, regularizers

from exactness import models as made
from exactness import steps
from exactness.elsewhere import ELSEWHERE
from keras_multigpu.keras_internals.versions import minor

History = dict[str, list[float]]
Fit = Callable[..., History]

# Every replica rounds the sum over its own examples to the precision it computes in:
# 8 significant bits in bfloat16, 11 in float16. One device rounds one sum.
BFLOAT16 = 2.0**-6
FLOAT16 = 2.0**-9

REPLICAS = (2, 3, 4, 8)


def once(model: keras.Model, fit: Fit) -> History:
    return fit()


def mse(**options: Any) -> dict[str, Any]:
    return {"optimizer": adam(), "loss": "mse", "metrics": ["mae"], **options}


def kinds(**options: Any) -> dict[str, Any]:
    loss = "sparse_categorical_crossentropy"
    return {"optimizer": adam(), "loss": loss, "metrics": ["accuracy"], **options}


def adam(**options: Any) -> keras.optimizers.Optimizer:
    """Adam with a rate at which a few steps change something."""
    return optimizers.Adam(0.02, **options)


def sgd(rate: Any = 0.1, **options: Any) -> keras.optimizers.Optimizer:
    return optimizers.SGD(rate, **options)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        name: What the row is about.
        model: Makes the model, not compiled.
        compile: Makes the arguments of `compile`.
        data: Makes `(x, y, sample_weight)`.
        batch_size: The global batch size.
        fit: Makes more arguments of `fit`, given an empty directory.
        train: Calls `fit`, perhaps several times.
        tolerance: The largest relative difference allowed.
        replicas: The numbers of replicas to run on.
        kind: Of the replicas' strategy.
        after: What is called after the training.
        shard: What replicas divide.
        gathers: The types of operations for which rows are gathered, so that no row becomes exact
            by becoming slow.
        in_graph: Whether plain Keras needs a graph for it, too.
    """

    name: str
    model: Callable[[], keras.Model] = made.mlp
    compile: Callable[[], dict[str, Any]] = mse
    data: Callable[[], tuple[Any, Any, Any]] = made.regression
    batch_size: int = 8
    fit: Callable[[Path], dict[str, Any]] = lambda directory: {}
    train: Callable[[keras.Model, Fit], History] = once
    tolerance: float = 2e-5
    replicas: tuple[int, ...] = REPLICAS
    kind: str = "mirrored"
    after: tuple[str, ...] = ("evaluate", "predict")
    shard: str | None = None
    gathers: str = ""
    in_graph: bool = False

    def compiled(self) -> keras.Model:
        """The compiled model, always with the same first weights."""
        keras.utils.set_random_seed(1)
        model = self.model()
        model.compile(**self.compile())
        return model


# Trainings that call `fit` more than once.


def thaw(model: keras.Model, fit: Fit) -> History:
    """Train without the first layer, with all, and without the last layer."""
    first, last = model.layers[0], model.layers[-1]
    histories = {}
    for first.trainable, last.trainable in [(False, True), (True, True), (True, False)]:
        model.compile(**mse(optimizer=sgd(momentum=0.9)))
        for name, values in fit().items():
            histories[f"{name} of {first.trainable} {last.trainable}"] = values
    return histories


def fit_twice(model: keras.Model, fit: Fit) -> History:
    first = fit()
    return {**fit(initial_epoch=2, epochs=4), "first": first["loss"]}


def crash_and_go_on(model: keras.Model, fit: Fit) -> History:
    """Crash in the second epoch, lose the weights, and call `fit` again."""
    with contextlib.suppress(InterruptedError):
        fit()
    model.set_weights([0.0 * weight for weight in model.get_weights()])
    return fit()


def halved(epoch: int, rate: float) -> float:
    return rate / 2


def loss_scaled() -> keras.optimizers.Optimizer:
    """Loss scaling that grows after 3 steps.

    From the usual scale of 2**15 one device's sum over a batch may overflow where the
    replicas' shorter sums do not, which is a difference, but not one to be avoided.
    """
    return optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**9, dynamic_growth_steps=3)


def several_optimizers() -> keras.optimizers.Optimizer:
    by_path = {".*kernel": sgd(momentum=0.9)}
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(adam(), by_path))


# Short forms of rows that differ in one thing.


def of_loss(name: str, make: Callable[[], Any], data: Any = made.regression) -> Case:
    return Case(name, compile=lambda: mse(loss=make()), data=data)


def of_reduction(reduction: str, data: Any = made.weighted) -> Case:
    return of_loss(
        f"reduction {reduction}", lambda: losses.MeanSquaredError(reduction=reduction), data
    )


def of_optimizer(name: str, make: Callable[[], Any], **more: Any) -> Case:
    return Case(name, compile=lambda: mse(optimizer=make()), **more)


def of_callback(make: Callable[[Path], Any], **more: Any) -> Case:
    """A row for a callback, with validation data."""
    name = type(make(Path())).__name__

    def arguments(directory: Path) -> dict[str, Any]:
        held_out = made.regression(16)[:2]
        return {"validation_data": held_out, "callbacks": [make(directory)], "epochs": 4}

    return Case(name, fit=arguments, **more)


BATCHES = [
    Case("full batches", data=lambda: made.regression(32)),
    Case("validation data", fit=lambda directory: {"validation_data": made.weighted(13)}),
    Case("batch smaller than the replicas", data=lambda: made.regression(7), batch_size=2),
    Case("partial last batch"),
    Case("odd batch", data=lambda: made.regression(35), batch_size=7),
]

WEIGHTS = [
    Case("sample weights", data=made.weighted),
    Case("sample weights for each timestep", made.series_tagger, kinds, made.series),
    Case(
        "weighted metrics",
        compile=lambda: mse(weighted_metrics=["mae", metrics.MeanSquaredError()]),
        data=made.weighted,
    ),
    Case(
        "class weights",
        made.classifier,
        lambda: kinds(weighted_metrics=["accuracy"]),
        made.classes,
        fit=lambda directory: {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0}},
    ),
]

LOSSES = [
    *map(of_reduction, ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"]),
    of_reduction("none", made.regression),
    Case(
        "a loss of each kind, one for each output",
        lambda: made.heads(len(made.LOSSES)),
        lambda: mse(loss=[make() for make in made.LOSSES], metrics=None),
        lambda: made.repeated_targets(len(made.LOSSES)),
    ),
    of_loss("function loss", lambda: made.absolute_cubes),
    of_loss("function loss, sample weights", lambda: made.absolute_cubes, made.weighted),
    of_loss("scalar-valued function loss", lambda: made.spread_of_errors),
    of_loss("Loss subclass", made.LogCosine, made.weighted),
    of_loss("Loss subclass with its own `__call__`", made.OwnReduction),
    Case(
        "loss that relates examples",
        lambda: made.mlp(3),
        lambda: mse(loss=losses.Circle(gamma=2.0), metrics=None),
        made.classes,
        # Pairs of examples need the rows of all replicas.
        gathers="MatMul Equal",
    ),
    Case("loss and metrics as strings", made.classifier, kinds, made.classes),
    Case(
        "crossentropy and accuracy as strings",
        made.yes_or_no_model,
        lambda: {"optimizer": "adam", "loss": "crossentropy", "metrics": ["accuracy"]},
        made.yes_or_no,
    ),
]

OUTPUTS = [
    Case(
        "an output without a loss",
        lambda: made.two_heads("list"),
        lambda: kinds(loss=[None, "sparse_categorical_crossentropy"], metrics=None),
        made.target_list,
    ),
    Case(
        "outputs as dict, sample weights, loss weights",
        made.two_heads,
        lambda: kinds(
            loss={"value": "mse", "kind": "sparse_categorical_crossentropy"},
            loss_weights={"value": 0.3, "kind": 2.0},
            metrics={"value": ["mae"], "kind": ["accuracy"]},
            weighted_metrics={"value": ["mse"]},
        ),
        made.two_weighted_targets,
    ),
    Case(
        "outputs as list, loss weights",
        lambda: made.two_heads("list"),
        lambda: kinds(
            loss=["mse", "sparse_categorical_crossentropy"],
            loss_weights=[0.3, 2.0],
            metrics=[["mae"], ["accuracy"]],
        ),
        made.target_list,
    ),
]

SEQUENCES = [
    Case(
        "masked words, pooling",
        lambda: made.reader(layers.GlobalAveragePooling1D()),
        mse,
        made.words,
    ),
    Case("masked words, LSTM", made.reader, mse, made.words),
    Case("mask in the loss", made.tagger, kinds, made.tagged_words),
    Case(
        "mask in the loss, sample weights",
        made.tagger,
        lambda: kinds(weighted_metrics=["accuracy"]),
        made.weighted_tags,
    ),
    Case(
        "mask in the loss, GRU",
        lambda: made.tagger(layers.GRU(4, return_sequences=True)),
        kinds,
        made.tagged_words,
    ),
    Case(
        "mask in the loss, mean_with_sample_weight",
        made.tagger,
        lambda: kinds(
            loss=losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
        ),
        made.weighted_tags,
    ),
    Case("embedding", made.embedding_mlp, mse, made.words),
    Case(
        "sharded optimizer, clipped by the norm of all",
        made.wide_mlp,
        lambda: mse(optimizer=sgd(0.01, momentum=0.9, global_clipnorm=0.5)),
        shard="optimizer",
    ),
]

PENALTIES = [
    Case(
        "kernel regularizers",
        lambda: made.mlp(kernel_regularizer=regularizers.L1L2(0.01, 0.1), bias_regularizer="l2"),
    ),
    Case("activity regularizer", lambda: made.mlp(activity_regularizer="l2")),
    Case("add_loss in a layer", lambda: made.mlp_with(made.OutputPenalty())),
    Case(
        "penalties of weights, activities and a layer",
        lambda: made.mlp_with(
            made.OutputPenalty(),
            kernel_regularizer=regularizers.L1L2(0.01, 0.1),
            bias_regularizer="l2",
            activity_regularizer="l2",
        ),
    ),
]

MODELS = [
    Case("frozen layer", lambda: made.frozen(made.mlp(), 0)),
    Case("fit twice", train=fit_twice),
    Case("trainable toggled between fits", train=thaw),
    Case("subclassed model", made.Subclassed),
    Case("nested models", made.nested),
    Case("convnet", made.convnet, kinds, made.images),
]

BATCH_NORM = [
    Case(
        "BatchNorm, full batches",
        made.bn_mlp,
        data=lambda: made.regression(32),
    ),
    Case("BatchNorm, partial batches", made.bn_mlp),
    Case(
        "BatchNorm, empty replicas",
        made.bn_mlp,
        data=lambda: made.regression(11),
        batch_size=3,
    ),
    Case("BatchNorm(synchronized=True)", lambda: made.bn_mlp(synchronized=True)),
    Case("BatchNorm, convnet", made.bn_convnet, kinds, made.images),
    Case("BatchNorm, masked", made.bn_reader, mse, made.words),
    Case("BatchNorm, frozen", lambda: made.frozen(made.bn_mlp(), 1)),
]

PRECISION = [
    Case(
        "mixed_bfloat16",
        lambda: made.in_precision("mixed_bfloat16", made.mlp),
        # After a few steps a bias is so small that its rounding is more than that of the rest.
        data=lambda: made.regression(29),
        tolerance=BFLOAT16,
    ),
    of_optimizer(
        "mixed_float16, loss scaling",
        loss_scaled,
        model=lambda: made.in_precision("mixed_float16", made.mlp),
        tolerance=FLOAT16,
    ),
    of_optimizer(
        "mixed_float16, overflow on one replica",
        loss_scaled,
        model=lambda: made.in_precision("mixed_float16", made.mlp),
        data=made.one_overflow,
        tolerance=FLOAT16,
    ),
    Case("float64", lambda: made.in_precision("float64", made.mlp)),
]

# Before Keras 3.13 it fails on TensorFlow.
MUON = [of_optimizer("Muon", lambda: optimizers.Muon(0.02))] * (minor(keras.version()) >= (3, 13))
# Keras 3.10 has none.
MULTI_OPTIMIZER = [of_optimizer("MultiOptimizer", several_optimizers)] * hasattr(
    optimizers, "MultiOptimizer"
)

OPTIMIZERS = [
    of_optimizer("SGD, momentum", lambda: sgd(momentum=0.9, nesterov=True)),
    of_optimizer("Adam, amsgrad", lambda: adam(amsgrad=True)),
    of_optimizer("AdamW", lambda: optimizers.AdamW(0.02, weight_decay=0.1)),
    of_optimizer("Lamb", lambda: optimizers.Lamb(0.02)),
    *MUON,
    of_optimizer("Nadam", lambda: optimizers.Nadam(0.02)),
    of_optimizer("Lion", lambda: optimizers.Lion(0.01)),
    of_optimizer("RMSprop", lambda: optimizers.RMSprop(0.01, centered=True)),
    of_optimizer("Adafactor", lambda: optimizers.Adafactor(0.02)),
    *MULTI_OPTIMIZER,
    of_optimizer(
        "learning rate schedule",
        lambda: sgd(optimizers.schedules.CosineDecay(0.2, 7, warmup_target=0.3, warmup_steps=2)),
    ),
    of_optimizer("EMA", lambda: adam(use_ema=True, ema_momentum=0.7)),
    of_optimizer(
        "EMA with overwrite",
        lambda: adam(use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3),
    ),
    of_optimizer("clipnorm", lambda: sgd(clipnorm=0.1)),
    of_optimizer("global_clipnorm", lambda: sgd(global_clipnorm=0.1)),
    of_optimizer("clipvalue", lambda: sgd(clipvalue=0.05)),
    of_optimizer(
        # 8 steps, or 10: the last group of 3 is never finished.
        "gradient accumulation",
        lambda: sgd(momentum=0.9, gradient_accumulation_steps=3),
    ),
    of_optimizer(
        "gradient accumulation, clipnorm, EMA",
        lambda: adam(clipnorm=0.1, use_ema=True, gradient_accumulation_steps=2),
    ),
]

EXECUTION = [
    Case(
        "steps_per_execution",
        compile=lambda: mse(steps_per_execution=3),
        data=lambda: made.regression(29),
    ),
    Case(
        # The last batch is a single example.
        "convolutions of each kind, empty replicas",
        made.convolutions,
        lambda: kinds(optimizer=sgd()),
        lambda: made.images(8),
    ),
    Case("jit_compile", compile=lambda: mse(jit_compile=True)),
    Case("run_eagerly", compile=lambda: mse(run_eagerly=True)),
]

METRICS = [
    Case(
        "custom metrics, a maximum and a count of batches",
        compile=lambda: mse(metrics=[made.LargestError(), made.Batches()]),
    ),
    Case(
        "AUC, Precision, Recall, F1Score",
        made.yes_or_no_model,
        lambda: {
            "optimizer": adam(),
            "loss": "binary_crossentropy",
            "metrics": [
                metrics.AUC(num_thresholds=50),
                metrics.Precision(),
                metrics.Recall(),
                metrics.F1Score(threshold=0.5),
            ],
        },
        made.yes_or_no,
    ),
    Case(
        "top-k, MeanIoU",
        made.classifier,
        lambda: kinds(
            metrics=[
                metrics.SparseTopKCategoricalAccuracy(2),
                metrics.MeanIoU(3, sparse_y_pred=False),
            ]
        ),
        made.classes,
    ),
    Case(
        "R2Score, root of the mean",
        compile=lambda: mse(metrics=[metrics.R2Score(), metrics.RootMeanSquaredError()]),
    ),
    Case(
        "metrics that add up, and others beside them",
        compile=lambda: mse(
            metrics=[made.LargeErrors(), made.spread_of_errors, metrics.CosineSimilarity(axis=0)],
            weighted_metrics=["mae"],
        ),
        data=made.weighted,
    ),
    Case("metric owned by a layer", lambda: made.mlp_with(made.MeasuredLayer())),
    Case("metric owned by the model", made.MetricOwner),
]

METHODS = [
    Case("compute_loss overridden", made.OwnLoss),
    Case("compute_metrics overridden", made.OwnMetrics),
    Case("train_step overridden", made.OwnTrainStep),
    Case("train_step overridden, sample weights", made.OwnTrainStep, data=made.weighted),
    Case(
        "train_step overridden, mask in the loss",
        lambda: made.stepping(made.tagger()),
        kinds,
        made.tagged_words,
    ),
    Case("train_step calls super", made.CountingTrainStep),
    Case("test_step overridden", made.OwnTestStep),
    Case("predict_step overridden", made.OwnPredictStep),
]

CENTRAL_STORAGE = [
    Case("central storage, jit_compile", compile=lambda: mse(jit_compile=True)),
    Case(
        "central storage, train_step and BatchNorm",
        lambda: made.stepping(made.bn_mlp()),
    ),
    Case("central storage, predict_step", made.OwnPredictStep),
]

RECIPES = [
    Case("loss object", steps.LossObject),
    Case(
        "loss object of the whole batch",
        lambda: steps.LossObject(losses.Dice()),
    ),
    Case("sums over a mask, penalties, clipping by hand", steps.Masked),
]


def published(name: str, model: Any, **more: Any) -> Case:
    """A row for a step of three batches, of which the last is smaller."""
    given = {
        "compile": lambda: {"optimizer": sgd(0.05, momentum=0.9), "jit_compile": False},
        "data": lambda: made.regression(12),
        "batch_size": 5,
        "fit": lambda directory: {"epochs": 1},
        "after": (),
        "replicas": (2, 3),
    }
    return Case(name, model, **given | more)


def layered(name: str, model: Any, **more: Any) -> Case:
    """A row for layers under Keras's own step."""

    def compiled() -> dict[str, Any]:
        return {"optimizer": sgd(0.05, momentum=0.9), "loss": "mse", "jit_compile": False}

    return published(name, model, compile=compiled, **more)


PUBLISHED = [
    published("SimCLR", steps.contrast(steps.SimClr), gathers="MatMul"),
    published("MoCo", steps.Moco, gathers="ConcatV2"),
    published("GAN", steps.Gan, compile=steps.adversaries),
    # One of the gradients is almost zero, mostly rounding, which Adam would make large.
    published("WGAN-GP", steps.Wgan, compile=lambda: steps.adversaries(epsilon=1e-3)),
    layered("VAE", steps.autoencoder),
    published("gradients accumulated by hand", steps.Collected, in_graph=True),
    published(
        "gradients of each row", steps.of_body(steps.Private, 4, 1), gathers="Reshape Transpose"
    ),
    published("second derivatives", steps.of_body(steps.Physics, 4, 1)),
    published("mean teacher", steps.Teacher, data=lambda: made.classes(12)),
    published("places of rows", steps.of_body(steps.Places, 8, 1), gathers="Roll"),
    layered("experts with capacity", steps.sequential(steps.Router), gathers="Cumsum"),
    layered("ragged", steps.Ragged, data=steps.sentences, gathers="GatherV2"),
    published(
        "slices of a queue",
        steps.Queue,
        data=lambda: made.classes(12),
        gathers="ResourceScatterNdAdd StridedSlice",
    ),
    layered(
        "along the batch",
        steps.sequential(steps.AlongTheBatch, lambda: layers.Dense(8)),
        gathers="Softmax",
    ),
]

CALLBACKS = [
    of_callback(lambda path: callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=0.5)),
    of_callback(
        lambda path: callbacks.EarlyStopping(patience=1, min_delta=0.5, restore_best_weights=True),
    ),
    of_callback(lambda path: callbacks.ModelCheckpoint(path / "best.keras", save_best_only=True)),
    of_callback(lambda path: callbacks.LearningRateScheduler(halved)),
    Case(
        "BackupAndRestore",
        fit=lambda path: {
            "callbacks": [
                callbacks.BackupAndRestore(path / "backup"),
                made.CrashOnce(path / "crashed"),
            ]
        },
        train=crash_and_go_on,
    ),
    of_callback(lambda path: callbacks.TensorBoard(path, write_graph=False)),
    of_callback(lambda path: callbacks.CSVLogger(path / "log.csv")),
    of_callback(
        lambda path: callbacks.SwapEMAWeights(swap_on_epoch=True),
        compile=lambda: mse(optimizer=adam(use_ema=True, ema_momentum=0.7)),
    ),
]


def in_turn(replicas: tuple[int, ...], cases: Iterable[Case], **changes: Any) -> list[Case]:
    """The rows, one after another on each of these numbers of replicas, changed like this."""
    if ALL_REPLICAS:
        return list(cases)
    turns = itertools.cycle(replicas)
    return [
        dataclasses.replace(
            case, replicas=() if case.name in ELSEWHERE else (next(turns),), **changes
        )
        for case in cases
    ]


def followed_by(after: tuple[str, ...], cases: Iterable[Case]) -> list[Case]:
    """The rows, with only this after the training unless all is asked for."""
    return [case if ALL_REPLICAS else dataclasses.replace(case, after=after) for case in cases]


IN_TURN = [OUTPUTS, EXECUTION, METHODS]
EVALUATED = [MODELS, WEIGHTS, LOSSES, SEQUENCES, PENALTIES, METRICS, RECIPES]
IN_TURN += [followed_by(("evaluate",), group) for group in EVALUATED]
# Neither an optimizer nor a callback of `fit` takes part in `evaluate`.
IN_TURN += [followed_by((), group) for group in (OPTIMIZERS, CALLBACKS)]
CASES = [
    *in_turn((8, 2), BATCHES),
    *in_turn((2, 3), followed_by(("evaluate",), BATCH_NORM)),
    *in_turn((2, 3), PUBLISHED),
    # Where 8 bits are left of a number, a batch of one example rounds differently.
    *in_turn((2, 3), followed_by(("evaluate",), PRECISION)),
    # No number divides 7, and the last example stands alone.
    *in_turn((3, 2), itertools.chain(*IN_TURN), batch_size=7),
    *in_turn(
        (2, 3),
        (dataclasses.replace(case, kind="central_storage") for case in CENTRAL_STORAGE),
        batch_size=7,
    ),
]
# One row of each group, for those who cannot wait.
QUICK = {
    next(case.name for case in group if case.name not in ELSEWHERE)
    for group in [BATCHES, BATCH_NORM, PUBLISHED, PRECISION, *IN_TURN]
}
