"""Two machines for the tests of clusters: network namespaces, which only root can create."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.processes_left import PATIENCE


@pytest.fixture(scope="session")
def machines():
    """Names of two namespaces. Each knows the other by its host name in SLURM."""
    if not shutil.which("ip"):
        pytest.skip("`ip` is not installed.")
    names = [f"kmg{os.getpid()}{letter}" for letter in "ab"]
    folders = [Path("/etc/netns", name) for name in names]
    steps = [f"ip netns add {name}" for name in names]
    steps.append(f"ip link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
    for number, name in enumerate(names, start=1):
        steps.append(f"ip -n {name} addr add 10.213.8.{number}/24 dev cable")
        steps += [f"ip -n {name} link set {device} up" for device in ("cable", "lo")]
    done = subprocess.run(
        ["sh", "-c", " && ".join(steps)], capture_output=True, timeout=PATIENCE, check=False
    )
    if done.returncode == 0:
        hosts = "".join(f"10.213.8.{index + 1} gpu0{7 + index}\n" for index in range(2))
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        yield names
    for name, folder in zip(names, folders, strict=True):
        subprocess.run(
            ["ip", "netns", "del", name], capture_output=True, timeout=PATIENCE, check=False
        )
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        pytest.skip("Only root can create networks.")
