"""Checks and times the package on GPUs: two where there are two, else one split in halves.

    python tests/gpu/gpu_checks.py                        all parts, each in its own process
    python tests/gpu/gpu_checks.py --only parity,step     some of them
    python tests/gpu/gpu_checks.py --cpu                  tiny, on two logical CPU devices

Results go to gpu.json in the folder that OUT names (else here) after each part, and into one table
at the end. Two halves share a chip: equal numbers, copies and memory can be judged there, but not
how much faster two GPUs are than one. Where there is no GPU this says so, and checks nothing.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.feed.cutter import AHEAD
from keras_multigpu.training.replication import replication_of

LIMITS = {  # Seconds after which a part is abandoned; the most important parts come first.
    "facts": 90,
    "parity": 300,
    "ahead": 120,
    "step": 300,
    "copy": 180,
    "memory:one": 120,
    "memory:stock": 120,
    "memory:ours": 120,
    "jit": 400,
}
SYSTEMS = ("one", "stock", "ours")
TURNS, STEPS, WARM_UP = 5, 10, 2
CPU = "--cpu" in sys.argv
PATIENCE = 10
"""How many seconds a step waits for a busy machine."""
KIND = "CPU" if CPU else "GPU"
DEVICES = [f"{KIND}:0", f"{KIND}:1"]
SIZE, BATCH, CLASSES = (32, 8, 10) if CPU else (224, 64, 1000)
SHARE_OF_A_CHIP = 0.4
"""Each half's part of a split GPU's memory; CUDA and cuDNN need some as well."""


def split() -> None:
    """Split one device into two, unless there are two GPUs."""
    chips = tf.config.list_physical_devices(KIND)
    if len(chips) > 1:
        tf.config.set_visible_devices(chips[:2], KIND)
        return
    limit = {} if CPU else {"memory_limit": int(SHARE_OF_A_CHIP * memory_of_a_chip())}
    halves = [tf.config.LogicalDeviceConfiguration(**limit) for _ in DEVICES]
    tf.config.set_logical_device_configuration(chips[0], halves)


def memory_of_a_chip() -> float:
    """The memory of the first GPU in MiB, as its driver reports it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout.splitlines()[0])


def strategy() -> tf.distribute.Strategy:
    """Both devices."""
    return kmg.strategy("mirrored", devices=DEVICES)


# Parity

Case = tuple[Callable[[], keras.Model], np.ndarray, np.ndarray, int, dict[str, Any], float]


def cases() -> dict[str, Case]:
    """Small models: how to build each, its data, batch size, options and tolerance."""
    layers, random = keras.layers, np.random.default_rng(0)
    numbers = random.normal(size=(101, 8)).astype("float32")
    images = random.normal(size=(61, 12, 12, 3)).astype("float32")
    series = random.normal(size=(61, 10, 6)).astype("float32")

    def labels(x: np.ndarray) -> np.ndarray:
        return random.integers(0, 3, len(x))

    def mlp() -> keras.Model:
        return keras.Sequential(
            [keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dense(16, "tanh"), layers.Dense(3)]
        )

    def convnet() -> keras.Model:
        x = keras.Input((12, 12, 3))
        y = layers.Conv2D(8, 3, use_bias=False)(x)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        y = layers.Conv2D(8, 3, strides=2)(y)
        return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling2D()(y)))

    def lstm() -> keras.Model:
        return keras.Sequential([keras.Input((10, 6)), layers.LSTM(8), layers.Dense(3)])

    half, four = {"policy": "mixed_float16"}, {"steps_per_execution": 4}
    return {
        "MLP, uneven batches": (mlp, numbers, labels(numbers), 16, {}, 2e-5),
        "convnet, synchronised BatchNorm": (convnet, images, labels(images), 16, {}, 5e-5),
        "LSTM": (lstm, series, labels(series), 16, {}, 2e-5),
        "mixed_float16": (mlp, numbers, labels(numbers), 16, half, 1e-2),
        "steps_per_execution=4": (mlp, numbers, labels(numbers), 8, four, 2e-5),
    }


def numbers_of(case: Case, place: Callable[[keras.Model], keras.Model]) -> list[np.ndarray]:
    """Weights, logs and predictions after two epochs."""
    build, x, y, batch, options, _ = case
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(options.get("policy", "float32"))
    model = place(build())
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
        steps_per_execution=options.get("steps_per_execution", 1),
    )
    history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0).history
    predictions = model.predict(x, batch_size=batch, verbose=0)
    logs = model.evaluate(x, y, batch_size=batch, verbose=0)
    keras.config.set_dtype_policy("float32")
    found = [*(w.numpy() for w in model.weights), *history.values(), predictions, logs]
    return [np.asarray(value, "float64") for value in found]


def parity() -> dict[str, Any]:
    """Each case on one device by plain Keras and on two replicas."""
    if not CPU:
        # TensorFloat-32 rounds inputs to ten bits, and each device sums in another order.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    both, result = strategy(), {}
    for name, case in cases().items():
        expected = numbers_of(case, lambda model: model)
        found = numbers_of(case, lambda model: kmg.distribute(model, both))
        difference = max(
            float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-3))
            for a, b in zip(expected, found, strict=True)
        )
        verdict = "equal" if difference <= case[-1] else "DIFFERS"
        result[name] = {"difference": difference, "limit": case[-1], "verdict": verdict}
    return {"parity": result}


# Time and memory


def network(images_on_device: bool) -> keras.Model:
    """ResNet50 on uint8 images, or on images that the device generates."""
    layers = keras.layers

    def draw(index: tf.Tensor) -> tf.Tensor:
        shape = (tf.shape(index)[0], SIZE, SIZE, 3)
        pixels = tf.random.stateless_uniform(shape, (1, 2), 0, 256, tf.int32)
        return tf.cast(pixels, "float32") / 255.0

    if images_on_device:
        x = keras.Input((1,), dtype="int32")
        y = layers.Lambda(draw, output_shape=(SIZE, SIZE, 3))(x)
    else:
        x = keras.Input((SIZE, SIZE, 3), dtype="uint8")
        y = layers.Rescaling(1 / 255)(x)
    if CPU:
        y = layers.Conv2D(8, 3, strides=2)(y)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        y = layers.Dense(CLASSES, "softmax")(layers.GlobalAveragePooling2D()(y))
    else:
        y = keras.applications.ResNet50(weights=None, classes=CLASSES, input_shape=(SIZE, SIZE, 3))(
            y
        )
    return keras.Model(x, y)


def made(system: str, jit: bool = False, images_on_device: bool = False) -> keras.Model:
    """The compiled network under plain Keras, stock MirroredStrategy or this package."""
    with strategy().scope() if system == "stock" else contextlib.nullcontext():
        model = network(images_on_device)
        if system == "ours":
            model = kmg.distribute(model, strategy())
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return model


def batches(images_on_device: bool = False) -> tf.data.Dataset:
    """An epoch of the same global batch, from the host's memory."""
    random = np.random.default_rng(0)
    shape, top = ((BATCH, 1), 9) if images_on_device else ((BATCH, SIZE, SIZE, 3), 256)
    x = random.integers(0, top, shape).astype("int32" if images_on_device else "uint8")
    y = random.integers(0, CLASSES, BATCH).astype("int32")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(WARM_UP + STEPS)
    return dataset.prefetch(2).with_options(options)


class Clock(keras.callbacks.Callback):
    """Notes when the timed steps of an epoch begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time once all devices have finished."""
        if batch + 1 in (WARM_UP, WARM_UP + STEPS):
            tf.test.experimental.sync_devices()
            self.times.append(time.perf_counter())


def milliseconds(model: keras.Model, data: tf.data.Dataset) -> float:
    """The mean time of a step."""
    clock = Clock()
    model.fit(data, epochs=1, verbose=0, callbacks=[clock])
    return 1e3 * (clock.times[1] - clock.times[0]) / STEPS


def turns(models: dict[str, keras.Model], data: dict[str, tf.data.Dataset]) -> dict[str, Any]:
    """Median and range over the turns; within each, the models run one after the other."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(TURNS + 1):
        for name, model in models.items():
            value = milliseconds(model, data[name])
            if turn:
                found[name].append(round(value, 3))
    return {
        name: {"ms": statistics.median(v), "from": min(v), "to": max(v)}
        for name, v in found.items()
    }


def step() -> dict[str, Any]:
    """Time of a step of each system, then images per second in evaluate and predict."""
    data = batches()
    models = {name: made(name) for name in SYSTEMS}
    result: dict[str, Any] = {"step": turns(models, dict.fromkeys(models, data))}
    for what in ("evaluate", "predict"):
        result[what] = {}
        for name, model in models.items():
            rates = []
            for _ in range(4):
                began = time.perf_counter()
                getattr(model, what)(data, verbose=0)
                rates.append(BATCH * (WARM_UP + STEPS) / (time.perf_counter() - began))
            result[what][name] = {"images/s": round(statistics.median(rates[1:]), 1)}
    return result


def copy() -> dict[str, Any]:
    """Images from the host against images that the device makes: the copy that is not hidden."""
    models, data = {}, {}
    for where, drawn in (("host", False), ("device", True)):
        for name in ("one", "ours"):
            models[f"{name}, {where}"] = made(name, images_on_device=drawn)
            data[f"{name}, {where}"] = batches(drawn)
    return {"copy": turns(models, data)}


class Ends(keras.callbacks.Callback):
    """Notes when steps end.

    Args:
        lasts: Whether a step takes longer than its devices, given its number.
    """

    def __init__(self, lasts: Callable[[int], bool]) -> None:
        super().__init__()
        self.lasts = lasts
        self.times: dict[int, float] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time once all devices have finished."""
        tf.test.experimental.sync_devices()
        latest = time.perf_counter() + PATIENCE
        while self.lasts(batch) and time.perf_counter() < latest:
            time.sleep(0.001)
        self.times[batch] = time.perf_counter()


def ahead() -> dict[str, Any]:
    """Where shares are, and whether those of a step reach their devices before the last one ends.

    AHEAD shares wait on the host for each GPU. That batch k + AHEAD + 2 is being made says that the
    GPUs have taken their shares of batch k + 1.
    """
    began: dict[int, float] = {}

    def note(number: np.ndarray) -> np.ndarray:
        began[int(number)] = time.perf_counter()
        return number

    def batch(
        number: tf.Tensor, example: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([tf.numpy_function(note, [number], tf.int64)]):
            return tf.identity(example[0]), example[1]

    later, model, steps = 2 if CPU else AHEAD + 2, made("ours"), WARM_UP + STEPS
    # On a busy machine a CPU finishes a small step before the thread that makes batches runs. There
    # the step waits for that thread: the batch comes if it is made before anybody asks for it.
    ends = Ends(lambda step: CPU and step + later < steps and step + later not in began)
    data = tf.data.Dataset.zip(tf.data.Dataset.range(steps), batches()).map(batch)
    shares = next(iter(replication_of(model).cutter.ahead(data)))
    devices = [rows.data[0].device.rpartition("device:")[2] for rows in shares.rows]
    model.fit(data, verbose=0, callbacks=[ends])
    began.clear()
    model.fit(data, verbose=0, callbacks=[ends])
    counted = [step for step in ends.times if step + later in began]
    in_time = sum(began[step + later] < ends.times[step] for step in counted)
    there = CPU or devices == DEVICES
    return {
        "ahead": {
            "shares lie on": {"devices": devices, "verdict": "right" if there else "DIFFERS"},
            "shares in time": {"of": len(counted), "steps": in_time},
        }
    }


def jit() -> dict[str, Any]:
    """Steps with `jit_compile`, where a system supports it."""
    data, result = batches(), {}
    for name in ("ours", "one", "stock"):
        began = time.perf_counter()
        try:
            result[name] = turns({name: made(name, jit=True)}, {name: data})[name]
            result[name]["whole, s"] = round(time.perf_counter() - began, 1)
        except Exception as error:  # Stock Keras crashes here: that is the result.
            result[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
    return {"jit": result}


def memory(system: str) -> dict[str, Any]:
    """The peak on each device over an epoch, with nothing else in the process."""
    model, data = made(system), batches()
    milliseconds(model, data)
    if CPU:
        return {"memory": {system: {"peak, MB": None}}}
    for device in DEVICES:
        tf.config.experimental.reset_memory_stats(device)
    milliseconds(model, data)
    peaks = [tf.config.experimental.get_memory_info(d)["peak"] / 1e6 for d in DEVICES]
    return {"memory": {system: {"peak, MB": [round(p, 1) for p in peaks]}}}


def facts() -> dict[str, Any]:
    """What ran where."""
    chips = tf.config.list_physical_devices("GPU")
    return {
        "facts": {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "chips": [tf.config.experimental.get_device_details(chip) for chip in chips],
            "devices": [device.name for device in tf.config.list_logical_devices(KIND)],
            "batch, size": [BATCH, SIZE],
        }
    }


def run_part(part: str) -> None:
    """Run one part in this process; its result is the last line."""
    split()
    name, _, detail = part.partition(":")
    parts = {
        "facts": facts,
        "parity": parity,
        "ahead": ahead,
        "step": step,
        "copy": copy,
        "jit": jit,
    }
    result = memory(detail) if name == "memory" else parts[name]()
    print("RESULT " + json.dumps(result, default=str), flush=True)


def collected(command: list[str], limit: float) -> dict[str, Any]:
    """Run a part; its result, or why there is none."""
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {limit:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": f"exit {done.returncode}: {done.stderr[-1500:]}"}
    result: dict[str, Any] = json.loads(lines[-1].partition(" ")[2])
    return result | {"seconds": round(time.perf_counter() - began, 1)}


def show(results: dict[str, Any]) -> None:
    """Print one line for each figure."""
    for part, found in results.items():
        print(f"{part} ({found.get('seconds')} s)")
        if "error" in found:
            print("    ERROR", str(found["error"]).strip())
        for title, rows in found.items():
            for name, figures in rows.items() if isinstance(rows, dict) else ():
                shown = figures
                if isinstance(figures, dict):
                    shown = "  ".join(f"{key} {value}" for key, value in figures.items())
                print(f"    {title:<10} {name:<34} {shown}")


def failed(results: dict[str, Any]) -> bool:
    """Whether a part ended in an error, or something differs."""
    checked = [results.get(part, {}).get(part, {}) for part in ("parity", "ahead")]
    verdicts = [found.get("verdict") for part in checked for found in part.values()]
    return "DIFFERS" in verdicts or any("error" in found for found in results.values())


def main() -> None:
    """Run the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(LIMITS), help=",".join(LIMITS))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--within", type=float, default=1500, help="seconds for all parts")
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part)
        return
    if not tf.config.list_physical_devices(KIND):
        print("TensorFlow sees no GPU on this machine: nothing was checked.")
        return
    target, began = Path(os.environ.get("OUT", ".")) / "gpu.json", time.perf_counter()
    results: dict[str, Any] = {}
    for part in arguments.only.split(","):
        command = [sys.executable, __file__, "--part", part, *["--cpu"][: int(CPU)]]
        limit = min(LIMITS[part], arguments.within - (time.perf_counter() - began))
        results[part] = collected(command, limit) if limit > 20 else {"error": "no time left"}
        temporary = target.with_suffix(".new")
        temporary.write_text(json.dumps(results, indent=1))
        temporary.replace(target)
        print(f"{part}: {results[part].get('seconds')} s", flush=True)
    show(results)
    sys.exit(failed(results))


if __name__ == "__main__":
    main()
