"""The checks of `keras-multigpu doctor` that need no TensorFlow: versions, host, disk, workers."""

import argparse
import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from keras_multigpu.cluster import apart, environment, managers, this_machine
from keras_multigpu.host_memory import available_bytes
from keras_multigpu.writing import size_text

REPORT = "Open an issue with what `keras-multigpu doctor --json` prints."


class Finding(NamedTuple):
    """The answer of a check: "ok", "look" or "wrong", a sentence, and what to do."""

    verdict: str
    says: str
    do: str = ""


def worst(findings: Iterable[Finding]) -> Finding:
    """One finding for several: those with the worst verdict, joined."""
    found = list(findings)
    verdict = max((each.verdict for each in found), key=("ok", "look", "wrong").index)
    worst = [each for each in found if each.verdict == verdict]
    advice = dict.fromkeys(each.do for each in worst if each.do)
    return Finding(verdict, "; ".join(each.says for each in worst), " ".join(advice))


def versions(arguments: argparse.Namespace) -> Finding:
    """Whether this package has what it requires, and no package overwrites another."""
    from packaging.requirements import Requirement

    there: dict[str, str] = {}
    for each in metadata.distributions():
        # Python imports the first of two.
        there.setdefault(each.name.lower().replace("_", "-"), each.version)
    owners = {name: {*each} for name, each in metadata.packages_distributions().items()}
    found = [Finding("ok", f"Python {'.'.join(map(str, sys.version_info[:3]))}")]
    for module in ("keras", "tensorflow", "cv2"):
        if len(rivals := sorted(owners.get(module, ()))) > 1:
            do = f"`pip uninstall {' '.join(rivals)}`, then install one of them again."
            found.append(Finding("wrong", f"{' and '.join(rivals)} overwrite each other", do))
    for line in metadata.requires("keras-multigpu") or ():
        wanted = Requirement(line)
        name = wanted.name.lower().replace("_", "-")
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        # Another package, such as tensorflow-cpu, may hold the module.
        if name not in there and name in owners:
            continue
        if name not in there or not wanted.specifier.contains(there[name], prereleases=True):
            asked = f"{name}{wanted.specifier}"
            what = f"keras-multigpu needs {asked}, and has {there.get(name, 'none')}"
            found.append(Finding("wrong", what, f"`pip install '{asked}'`."))
    shown = [f"{name} {there[name]}" for name in ("keras", "tensorflow", "numpy") if name in there]
    return worst([found[0]._replace(says=", ".join([found[0].says, *shown])), *found[1:]])


def backend(arguments: argparse.Namespace) -> Finding:
    """Whether the environment selects Keras 3 on TensorFlow; `tensorflow` imports both."""
    said = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if said != "tensorflow":
        do = "Set KERAS_BACKEND=tensorflow before Python starts."
        return Finding("wrong", f"KERAS_BACKEND={said!r}; this package needs TensorFlow", do)
    if (legacy := os.environ.get("TF_USE_LEGACY_KERAS", "0")) in ("1", "true", "True"):
        what = f"TF_USE_LEGACY_KERAS={legacy!r} makes `tf.keras` Keras 2"
        return Finding("wrong", what, "Unset it, and write `import keras`.")
    return Finding("ok", "Keras 3 on TensorFlow, as far as the environment says")


SHARED_MEMORY = 512 * 2**20
"""Bytes of /dev/shm that NCCL may need between the GPUs of a host."""


def host(arguments: argparse.Namespace) -> Finding:
    """The cores, memory and shared memory that this container may use."""
    usable, cores = len(os.sched_getaffinity(0)), os.cpu_count()
    what = f"{usable} of {cores} cores, {size_text(available_bytes())} of memory free"
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").free
        what += f", /dev/shm {size_text(shared)}"
        if shared < SHARED_MEMORY and len(this_machine.visible_gpus()) > 1:
            do = "`docker run --shm-size=1g`; in Kubernetes an emptyDir with `medium: Memory`."
            return Finding("look", f"{what}, and several GPUs that exchange through it", do)
    return Finding("ok", what)


WRITTEN, TIGHT = 16 * 2**20, 2**30
"""Bytes to write, and free bytes that a folder should have at least."""


def folder(arguments: argparse.Namespace) -> Finding:
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
        return Finding("wrong", f"{path} cannot be written: {error.strerror or error}", do)
    what = f"{path}: {size_text(free)} free, files can be renamed"
    if not locks:
        do = "Let only one process at a time fill a cache there, or mount it with locks."
        return Finding("look", f"{what}, but not locked", do)
    if free < TIGHT:
        return Finding("look", f"{what} and locked", "Checkpoints need more space.")
    return Finding("ok", f"{what} and locked")


REACHED = 3.0
"""Seconds that a connection may take."""


def cluster(arguments: argparse.Namespace) -> Finding:
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
        return Finding("ok", "neither TF_CONFIG nor SLURM names other workers")
    source = f"{found[0].title if found else 'TF_CONFIG names'} {len(every)} processes"
    findings = [Finding("ok", f"{source}, {', '.join(own) or 'none'} is this one")]
    if own and not this_machine.is_free(environment.place_of(own[0])[1], ""):
        do = "Fine if this training is already running; else `ss -ltnp` names the process."
        findings.append(Finding("look", f"the port of {own[0]}, this worker, is taken", do))
    with ThreadPoolExecutor(16) as pool:
        return worst([*findings, *pool.map(reached, [each for each in every if each not in own])])


def in_three_parts(verdict: str, problem: str) -> Finding:
    what, _, rest = problem.partition(". Expected ")
    return Finding(verdict, what, f"Expected {rest.partition(' Received: ')[0]}")


def reached(address: str) -> Finding:
    began = time.monotonic()
    try:
        socket.create_connection(environment.place_of(address), REACHED).close()
    except ConnectionRefusedError:
        do = "Fine before the training starts."
        return Finding("look", f"nothing listens at {address}", do)
    except OSError as error:
        do = "Check the name, and that no firewall is between the machines."
        return Finding("wrong", f"{address} cannot be reached ({error})", do)
    return Finding("ok", f"{address} answers in {1e3 * (time.monotonic() - began):.1f} ms")
