"""The checks of `keras-multigpu doctor`, the last three of which need TensorFlow."""

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from keras_multigpu.cluster import apart, environment, managers, this_machine
from keras_multigpu.writing import size_text

REPORT = "Else open an issue with what `keras-multigpu doctor --json` prints."
NCCL = (
    "Try NCCL_P2P_DISABLE=1; if that helps, switch off PCI access control (ACS) in the BIOS. "
    "`nvidia-smi topo -m` shows the links, and NCCL_DEBUG=INFO what NCCL does."
)


class Answer(NamedTuple):
    """The answer of a check: "ok", "look" or "wrong", a sentence, and what to do."""

    verdict: str
    says: str
    do: str = ""


def worst(findings: Iterable[Answer]) -> Answer:
    """One finding for several: those with the worst verdict, joined."""
    found = list(findings)
    verdict = max((each.verdict for each in found), key=("ok", "look", "wrong").index)
    worst = [each for each in found if each.verdict == verdict]
    advice = dict.fromkeys(each.do for each in worst if each.do)
    return Answer(verdict, "; ".join(each.says for each in worst), " ".join(advice))


WRITTEN, TIGHT = 16 * 2**20, 2**30
"""Bytes to write, and free bytes that a folder should have at least."""


def folder(arguments: argparse.Namespace) -> Answer:
    """Whether files in a folder can be written, renamed and locked."""
    import fcntl

    path = Path(arguments.folder).absolute()
    path = next(each for each in (path, *path.parents) if each.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".keras-multigpu-doctor-", dir=path) as inside:
            old, new = Path(inside, "old"), Path(inside, "new")
            old.touch()
            with new.open("wb") as file:
                file.write(os.urandom(WRITTEN))
                file.flush()
                os.fsync(file.fileno())
            free = shutil.disk_usage(path).free
            os.replace(new, old)
            with old.open("rb") as one, old.open("rb") as other, contextlib.suppress(OSError):
                locks = False
                fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks = True
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks = False
    except OSError as error:
        do = "Choose another `--folder`, or fix its permissions, quota or mount."
        return Answer("wrong", f"{path} cannot be written: {error.strerror or error}", do)
    what = f"{path}: {size_text(free)} free, files can be renamed"
    if not locks:
        do = "Let only one process at a time fill a cache there, or mount it with locks."
        return Answer("look", f"{what}, but not locked", do)
    if free < TIGHT:
        return Answer("look", f"{what} and locked", "Checkpoints need more space.")
    return Answer("ok", f"{what} and locked")


REACHED = 3.0
"""Seconds that a connection may take."""


def cluster(arguments: argparse.Namespace) -> Answer:
    """Whether TF_CONFIG or SLURM's variables are valid, and the other workers can be reached."""
    try:
        environment.settings()
        config = environment.tf_config()
        found = managers.find_cluster()
        if not config and not found and (what := apart.training_apart()):
            return in_three_parts("look", what)
    except ValueError as error:
        return in_three_parts("wrong", str(error))
    if config:
        every = [each for addresses in config.addresses.values() for each in addresses]
        own = config.addresses.get(config.role, ())[config.index : config.index + 1]
    elif found:
        _, workers = found
        every, own = [*workers.workers], workers.workers[workers.index : workers.index + 1]
    else:
        return Answer("ok", "neither TF_CONFIG nor SLURM names other workers")
    source = f"{found[0].title if found else 'TF_CONFIG names'} {len(every)} processes"
    findings = [Answer("ok", f"{source}, {', '.join(own) or 'none'} is this one")]
    if own and not this_machine.is_free(environment.place_of(own[0])[1]):
        do = "Fine if this training is already running; else `ss -ltnp` names the process."
        findings.append(Answer("look", f"the port of {own[0]}, this worker, is taken", do))
    with ThreadPoolExecutor(16) as pool:
        return worst(
            [*findings, *pool.map(try_to_connect, [each for each in every if each not in own])]
        )


def in_three_parts(verdict: str, problem: str) -> Answer:
    what, _, rest = problem.partition(". Expected ")
    return Answer(verdict, what, f"Expected {rest.partition(' Received: ')[0]}")


def try_to_connect(address: str) -> Answer:
    began = time.monotonic()
    try:
        socket.create_connection(environment.place_of(address), REACHED).close()
    except ConnectionRefusedError:
        do = "Fine before the training starts."
        return Answer("look", f"nothing listens at {address}", do)
    except OSError as error:
        do = "Check the name, and that no firewall is between the machines."
        return Answer("wrong", f"{address} cannot be reached ({error})", do)
    return Answer("ok", f"{address} answers in {1e3 * (time.monotonic() - began):.1f} ms")


def tensorflow(arguments: argparse.Namespace) -> Answer:
    """Whether Keras runs on TensorFlow, both in versions that were tested."""
    began = time.monotonic()
    try:
        import tensorflow as tf

        # Raises on another backend.
        from keras_multigpu.keras_internals.versions import newer_than_tested
    except Exception as error:  # A broken installation may raise anything.
        if ". Expected " in str(error):
            raise
        what = f"Keras on TensorFlow cannot be imported: {type(error).__name__}: {error}"
        return Answer("wrong", what, "`pip install --force-reinstall keras tensorflow`.")
    cuda = tf.sysconfig.get_build_info().get("cuda_version") or "not built in"
    what = f"Keras {metadata.version('keras')}, TensorFlow {tf.__version__} (CUDA {cuda})"
    if newer := newer_than_tested():
        return Answer("look", newer, "Run `keras-multigpu verify` with a model of yours.")
    return Answer("ok", f"{what}, imported in {time.monotonic() - began:.1f} s")


def gpus(arguments: argparse.Namespace) -> Answer:
    """Whether TensorFlow sees the GPUs that the driver sees, and they are alike and free."""
    import tensorflow as tf

    listed: list[list[str]] = []
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,memory.used"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = " ".join((done.stdout + done.stderr).split())
            do = "Restart the machine if the driver was updated; else reinstall the driver."
            return Answer("wrong", f"the driver does not answer: {said}", do)
        listed = [line.split(", ") for line in done.stdout.splitlines()]
    seen = len(tf.config.list_physical_devices("GPU"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    what = f"TensorFlow sees {seen} of {len(listed)} GPUs"
    if visible is not None and seen < max(len(listed), 1):
        what = f"{what}; CUDA_VISIBLE_DEVICES={visible!r} hides the others"
        return Answer("look", what, "Unset CUDA_VISIBLE_DEVICES to use all.")
    if seen < len(listed):
        do = "`pip install 'tensorflow[and-cuda]'`; TF_CPP_MIN_LOG_LEVEL=0 shows what is missing."
        return Answer("wrong", what, do)
    if not seen:
        return Answer("ok", "no NVIDIA GPU: replicas are CPU devices, whose speed means nothing")
    kinds = ", ".join(
        sorted(
            {
                f"{name} ({size_text(int(float(memory)) * 2**20)}, driver {driver})"
                for name, driver, memory, _ in listed
            }
        )
    )
    found = [Answer("ok", f"{what}: {kinds}", "`kmg.memory(model)` says whether a model fits.")]
    if len({name for name, *_ in listed}) > 1:
        do = "The slowest sets the pace: hide it with CUDA_VISIBLE_DEVICES."
        found.append(Answer("look", f"the GPUs differ: {kinds}", do))
    busy = [str(index) for index, each in enumerate(listed) if 10 * float(each[3]) > float(each[2])]
    if busy:
        what = f"other processes use the memory of GPU {', '.join(busy)}"
        found.append(Answer("look", what, "`nvidia-smi` names them."))
    return worst(found)


def step(arguments: argparse.Namespace) -> Answer:
    """Whether a small training on all devices matches one device."""
    import keras
    import numpy as np

    from keras_multigpu.devices import device_count
    from keras_multigpu.verification import in_this_process

    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", "mse")
        return model

    def data() -> Any:
        random = np.random.default_rng(0)
        return random.normal(size=(29, 8, 8, 3)), random.normal(size=(29, 3))

    count = device_count("GPU") or 2
    # Also lets GPUs take memory as they need it.
    in_this_process.devices_are_ready(count)
    gpus = f"{count} GPU{'s' * (count > 1)}"
    called = gpus if device_count("GPU") else "2 logical CPU devices"
    report = in_this_process.run(build, data, (count,), 2).reports[0]
    if report.agrees:
        what = f"two steps on {called} and on one agree to {report.largest_difference:.0e}"
        return Answer("ok", what)
    how = report.error or f"differ, first in {report.first_difference}"
    return Answer("wrong", f"two steps on {called} and on one: {how}", f"{NCCL} {REPORT}")
