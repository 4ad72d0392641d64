"""The checks of `keras-multigpu doctor` that need TensorFlow: devices, links, a step."""

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keras_multigpu.cluster.this_machine import visible_gpus
from keras_multigpu.commands.doctor_machine import REPORT, Finding, worst

NCCL = (
    "Try NCCL_P2P_DISABLE=1; if that helps, switch off PCI access control (ACS) in the BIOS. "
    "`nvidia-smi topo -m` shows the links, and NCCL_DEBUG=INFO what NCCL does."
)


def tensorflow(arguments: argparse.Namespace) -> Finding:
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
        return Finding("wrong", what, "`pip install --force-reinstall keras tensorflow`.")
    cuda = tf.sysconfig.get_build_info().get("cuda_version")
    what = f"Keras {version('keras')}, TensorFlow {tf.__version__} (CUDA {cuda or 'not built in'})"
    if newer := newer_than_tested():
        return Finding("look", newer, "Run `keras-multigpu verify` with a model of yours.")
    return Finding("ok", f"{what}, imported in {time.monotonic() - began:.1f} s")


def gpus(arguments: argparse.Namespace) -> Finding:
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
            return Finding("wrong", f"the driver does not answer: {said}", do)
        listed = [line.split(", ") for line in done.stdout.splitlines()]
    seen = len(tf.config.list_physical_devices("GPU"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    what = f"TensorFlow sees {seen} of {len(listed)} GPUs"
    if visible is not None and seen < max(len(listed), 1):
        what = f"{what}; CUDA_VISIBLE_DEVICES={visible!r} hides the others"
        return Finding("look", what, "Unset CUDA_VISIBLE_DEVICES to use all.")
    if seen < len(listed):
        do = "`pip install 'tensorflow[and-cuda]'`; TF_CPP_MIN_LOG_LEVEL=0 shows what is missing."
        return Finding("wrong", what, do)
    if not seen:
        return Finding("ok", "no NVIDIA GPU: replicas are CPU devices, whose speed means nothing")
    kinds = ", ".join(sorted({f"{name} (driver {driver})" for name, driver, *_ in listed}))
    found = [Finding("ok", f"{what}: {kinds}")]
    if len({name for name, *_ in listed}) > 1:
        do = "The slowest sets the pace: hide it with CUDA_VISIBLE_DEVICES."
        found.append(Finding("look", f"the GPUs differ: {kinds}", do))
    busy = [str(index) for index, each in enumerate(listed) if 10 * float(each[3]) > float(each[2])]
    if busy:
        what = f"other processes use the memory of GPU {', '.join(busy)}"
        found.append(Finding("look", what, "`nvidia-smi` names them."))
    return worst(found)


def devices() -> tuple[list[str], str]:
    """All GPUs, or two logical CPU devices; and what a sentence calls them."""
    from keras_multigpu.devices import device_count
    from keras_multigpu.verification.in_this_process import devices_are_ready

    count = device_count("GPU")
    # Also lets GPUs take memory as they need it.
    devices_are_ready(max(count, 2))
    if not count:
        return ["CPU:0", "CPU:1"], "2 logical CPU devices"
    return [f"GPU:{index}" for index in range(count)], f"{count} GPU{'s' * (count > 1)}"


def links(arguments: argparse.Namespace) -> Finding:
    """Whether copies and sums between devices are right; peer access and NCCL of GPUs."""
    import numpy as np
    import tensorflow as tf

    from keras_multigpu.replicas import obtained

    names, called = devices()
    for source in names:
        with tf.device(source):
            sent = tf.range(2**20, dtype="float32") + 1
        for target in names:
            with tf.device(target):
                arrived = tf.identity(sent).numpy()
            if not np.array_equal(arrived, np.arange(2**20, dtype="float32") + 1):
                what = f"{target} receives other numbers than {source} sent"
                return Finding("wrong", what, NCCL)
    strategy = obtained("mirrored", devices=names)

    def share(ones: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context()
        number = tf.cast(replica.replica_id_in_sync_group + 1, "float32")
        return replica.all_reduce("sum", ones * number)

    summed = tf.function(lambda ones: strategy.run(share, (ones,)))
    parts = strategy.experimental_local_results(summed(tf.ones(2**20)))
    ends = [float(part[-1]) for part in parts]
    if ends != [sum(range(1, len(names) + 1))] * len(names):
        return Finding("wrong", f"sums over {called} are wrong", NCCL)
    what = f"copies and sums over {called} are right"
    if names[0] != "GPU:0" or len(names) == 1:
        return Finding("ok", what)
    what = f"{what}, NCCL {nccl_version(nccl_libraries()) or 'of unknown version'}"
    apart = without_peer_access(said_by("nvidia-smi", "topo", "-p2p", "r"), visible_gpus())
    if apart:
        return Finding("look", f"{what}, but slow: no peer access of {', '.join(apart)}", NCCL)
    return Finding("ok", what)


def said_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def without_peer_access(peers: str, gpus: Sequence[str]) -> list[str]:
    """Pairs of these GPUs that are not "OK" in `nvidia-smi topo -p2p r`, with its reason."""
    rows = [row.split() for row in re.findall(r"^ *GPU\d+\s+(?!GPU).*", peers, re.MULTILINE)]
    names = [row[0] for row in rows]
    wanted = {f"GPU{gpu}" for gpu in gpus}
    return [
        f"{row[0]} and {other}: {access}"
        for place, row in enumerate(rows)
        for other, access in zip(names[place + 1 :], row[place + 2 :], strict=False)
        if access != "OK" and {row[0], other} <= wanted
    ]


def packages_folder() -> Path:
    """Where pip puts NVIDIA's libraries, from which TensorFlow loads them."""
    return Path(sysconfig.get_path("purelib")) / "nvidia"


def nccl_libraries() -> list[str]:
    return [str(packages_folder() / "nccl/lib/libnccl.so.2"), "libnccl.so.2"]


def nccl_version(libraries: Iterable[str]) -> str:
    """The version of the first of these libraries that can be loaded; empty without one."""
    number = ctypes.c_int()
    for library in libraries:
        try:
            ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        return dotted(number.value)
    return ""


def dotted(number: int) -> str:
    """NCCL's version, which is 22707 for 2.27.7, and was 2708 for 2.7.8."""
    major = 10_000 if number >= 10_000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def xla(arguments: argparse.Namespace) -> Finding:
    """What `jit_compile="auto"` becomes, and whether XLA finds what it compiles with."""
    from keras_multigpu.devices import device_count

    count = device_count("GPU")
    if not count:
        return Finding("ok", 'jit_compile="auto" is False, as there is no GPU')
    becomes = "Keras's choice, which is usually True" if count == 1 else "False on several replicas"
    says = f'jit_compile="auto" is {becomes}'
    if missing := missing_for_xla(cuda_folders(), os.environ.get("PATH", "")):
        do = "`pip install nvidia-cuda-nvcc-cu12`, or XLA_FLAGS=--xla_gpu_cuda_data_dir=/usr/..."
        return Finding("look", f"{says}; XLA may fail without {' and '.join(missing)}", do)
    return Finding("ok", f"{says}; ptxas and libdevice are there")


def cuda_folders() -> list[Path]:
    """Where XLA looks for CUDA."""
    given = re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
    here = [packages_folder() / "cuda_nvcc", *sorted(Path("/usr/local").glob("cuda*"))]
    return [*map(Path, given), *here, Path("/opt/cuda")]


def missing_for_xla(folders: Sequence[Path], path: str) -> list[str]:
    """Which of CUDA's parts XLA would not find in these folders, and programs in `path`."""
    found = shutil.which(
        "ptxas", path=os.pathsep.join([*(f"{each}/bin" for each in folders), path])
    )
    bitcode = any((each / "nvvm/libdevice/libdevice.10.bc").is_file() for each in folders)
    return [name for name, there in (("ptxas", found), ("libdevice", bitcode)) if not there]


def step(arguments: argparse.Namespace) -> Finding:
    """Whether a small training on all devices matches one device."""
    import keras
    import numpy as np

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

    names, called = devices()
    report = in_this_process.run(build, data, (len(names),), 2).reports[0]
    if report.agrees:
        what = f"two steps on {called} and on one agree to {report.largest_difference:.0e}"
        return Finding("ok", what)
    how = report.error or f"differ, first in {report.first_difference}"
    return Finding("wrong", f"two steps on {called} and on one: {how}", REPORT)
