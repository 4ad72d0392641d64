"""A plugin of pytest: in Keras's own tests every model is distributed before it is used.

`tests/keras_suite/__main__.py` starts it. A model becomes distributed where a test compiles it, or
where it predicts without `compile`; nothing else about the test changes. With `--replicas=0` the
models stay as they are, to see what Keras does itself.
"""

import contextlib
import functools
import gc
import importlib.machinery
import importlib.util
import inspect
import os
import re
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

gc.set_threshold(100_000, 10, 2)  # As in our `conftest.py`.
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf
from differences import DIFFERENCES, KERAS_ALONE, TO_BE_MENDED, Difference
from files import RUNS_A_MODEL
from keras.src.backend.tensorflow import trainer as keras_trainer

import keras_multigpu as kmg

KERAS = Path(keras.__file__).parent / "src"
SECONDS = 120
# Packages that some tests need and that neither Keras nor we ask for.
OTHERS = re.compile(r"\b(grain|jax|onnx|openvino|orbax|pydot|torch)\b")
# What makes a model run.
METHODS = (
    "compile",
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)


KERAS_TRAINER = keras_trainer.TensorFlowTrainer


class Trainer(keras.Model):
    """What Keras's tests mix with a layer to get a model; Keras's own is not a `keras.Model`."""

    layers: Any = None  # A name that `keras.Model` keeps for itself and a layer need not.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the layer's `call` and `build` come before those of `keras.Model`."""
        super().__init_subclass__(**kwargs)
        for layer in reversed(cls.__mro__):
            if issubclass(layer, keras.Layer) and layer not in keras.Model.__mro__:
                for name in vars(keras.Model).keys() & vars(layer).keys():
                    if not name.startswith("__"):
                        setattr(cls, name, vars(layer)[name])

    def __init__(self) -> None:
        KERAS_TRAINER.__init__(self)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--replicas`."""
    parser.addoption("--replicas", type=int, default=2, help="over how many; 0 for Keras alone")


def pytest_configure(config: pytest.Config) -> None:
    """Start as many devices as there are replicas, and distribute what will be compiled."""
    replicas = config.getoption("replicas")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * max(replicas, 1),
    )
    # Graphs run a few times only: to optimise them takes longer than all the rest.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    gc.freeze()
    if not replicas:
        return
    strategy = kmg.strategy(devices=replicas)
    for name in METHODS:
        # Keras compares some of them with those of its `Trainer`.
        owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
        setattr(owner, name, distributing(name, strategy))


def distributing(name: str, strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """A method of `keras.Model` that distributes the model first."""
    original = getattr(keras.Model, name)

    @functools.wraps(original)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, kmg.DistributedModel):
            return original(self, *args, **kwargs)
        # A model that was made in the scope of a strategy stays with it.
        kmg.distribute(self, self._distribute_strategy or strategy)
        return getattr(kmg.DistributedModel, name)(self, *args, **kwargs)

    return method


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Import the tests where `Trainer` is a model, and where all that they import is there."""
    with stand_ins() if isinstance(collector, pytest.Module) else contextlib.nullcontext():
        keras_trainer.TensorFlowTrainer = Trainer
        try:
            return (yield)
        finally:
            keras_trainer.TensorFlowTrainer = KERAS_TRAINER


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Modules for files that import them, and run for the sake of tests that do not need them."""
    # Keras's repository has this one beside the package.
    made = {"conftest": types.ModuleType("conftest")}
    made["conftest"].skip_if_backend = lambda backend, reason: lambda test: test
    for name in ("grain", "jax", "torch"):
        if importlib.util.find_spec(name) is None:
            made[name] = types.ModuleType(name)
            made[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
            made[name].__getattr__ = functools.partial(raise_missing, name)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def raise_missing(package: str, attribute: str) -> Any:
    """Say that a package is missing, where a test uses it."""
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    raise ImportError(f"{package} is not installed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Expect the listed tests to fail. One that passes is an error, and so is an unknown name."""
    items[:] = [item for item in items if runs_a_model(item)]
    names = {item: name_of(item) for item in items}
    unknown = []
    for pattern, difference in expected_failures(config.getoption("replicas")).items():
        found = [item for item, name in names.items() if matches(pattern, name)]
        for item in found:
            item.add_marker(pytest.mark.xfail(reason=difference.what, strict=difference.everywhere))
        file = pattern.partition("::")[0]
        whole = any(argument.endswith(file) for argument in config.args)
        if whole and not found:
            unknown.append(pattern)
    if unknown:
        raise pytest.UsageError(f"differences.py names tests that Keras does not have: {unknown}")


def runs_a_model(item: pytest.Item) -> bool:
    """Whether a test is about models; of layers and operations those are that train one."""
    folder = item.path.relative_to(KERAS).parts[0]
    if folder not in ("layers", "ops", "backend", "optimizers", "metrics"):
        return True
    # Of the thousands of others each would only repeat what Keras tests of a layer by itself.
    return RUNS_A_MODEL.search(inspect.getsource(item.function)) is not None


def name_of(item: pytest.Item) -> str:
    """A test's name in `differences.py`."""
    file = item.path.relative_to(KERAS).as_posix()
    return "::".join([file, *item.nodeid.split("::")[1:]])


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern, in which `*` stands for anything."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None


def expected_failures(replicas: int) -> dict[str, Difference]:
    """Why tests fail, by patterns of their names."""
    listed = [*DIFFERENCES, *KERAS_ALONE, *TO_BE_MENDED]
    return {
        pattern: difference
        for difference in listed
        if replicas in difference.replicas
        for pattern in difference.tests
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End a test that hangs."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"The test takes more than {SECONDS} seconds.")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Call a test skipped that needs a package which is not there."""
    report = yield
    error = call.excinfo and call.excinfo.value
    if isinstance(error, ImportError) and OTHERS.search(str(error)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], str(error))
        report.__dict__.pop("wasxfail", None)
    return report
