"""Builds the files for PyPI, and tries them on every supported Python here, as a user would.

    python tests/release/make_dist.py                    `make dist`
    python tests/release/make_dist.py --pythons 3.12     on one of them
    python tests/release/make_dist.py --upload v0.3.0    checks first that this tag can be released

Wheel and sdist go to dist/. The wheel is installed into an empty environment, which needs a network
and, for a while, 2.5 GB in build/. The output of each step stays in build/dist/.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST, LOGS = ROOT / "dist", ROOT / "build" / "dist"
TOOLS = LOGS / "tools" / "bin"
# Users have neither the clone nor its environment on their paths.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
}


class Failed(Exception):
    """A step failed; its output is on the screen."""


def main() -> int:
    """Build and try; 0 if everything worked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", nargs="+", default=supported_pythons(), metavar="VERSION")
    parser.add_argument("--upload", metavar="TAG", help="a tag that is going to PyPI")
    arguments = parser.parse_args()
    if arguments.upload and (problems := what_forbids(arguments.upload, ROOT)):
        print("Not ready for PyPI:", *problems, sep="\n  ")
        return 1
    try:
        wheel = built()
    except Failed:
        return 1
    failed = {version: tried(version, wheel) for version in arguments.pythons}
    if COLAB in arguments.pythons:
        failed["on Colab"] = tried(COLAB, wheel, packages_of_colab())
    known = {version: steps for version, steps in failed.items() if steps is not None}
    print("Failed:", {version: steps for version, steps in known.items() if steps} or "nothing")
    return 0 if known and not any(known.values()) else 1


def supported_pythons() -> list[str]:
    """The minor versions that the classifiers name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [classifier.split(" :: ")[-1] for classifier in project["classifiers"]]
    return [version for version in versions if version.startswith("3.")]


COLAB = "3.12"
"""The Python of Colab and Kaggle."""


def packages_of_colab() -> list[str]:
    """What is installed there, with versions: a notebook must not have to change any of it."""
    (versions,) = re.findall(r"^VERSIONS_colab := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    return versions.split()


WITH_ADDRESSES = (
    "pyproject.toml",
    "CITATION.cff",
    "README.md",
    "examples/scoreboard_colab.ipynb",
    "examples/scoreboard_kaggle.ipynb",
)


def what_forbids(tag: str, root: Path) -> list[str]:
    """Sentences that say what has to be done before this tag is uploaded."""
    package = (root / "keras_multigpu" / "__init__.py").read_text()
    problems = []
    if f'__version__ = "{tag.removeprefix("v")}"' not in package or not tag.startswith("v"):
        problems.append(f"{tag} is not v and the __version__ of keras_multigpu/__init__.py.")
    if f"\n## {tag.removeprefix('v')} (20" not in (root / "CHANGELOG.md").read_text():
        problems.append(f"CHANGELOG.md has no heading of {tag} with a date.")
    problems += [
        f"{name} still names OWNER where the owner of the repository belongs."
        for name in WITH_ADDRESSES
        if "/OWNER/" in (root / name).read_text()
    ]
    return problems


def run(what: str, *command: str | Path, where: Path = ROOT) -> None:
    """Run a step, and print how many seconds it took.

    Raises:
        Failed: If the step failed; the end of its output is printed.
    """
    print(f"  {what:.<40}", end="", flush=True)
    log = LOGS / f"{what.replace(' ', '_')}.txt"
    start = time.monotonic()
    with log.open("w") as output:
        ended = subprocess.run(
            list(map(str, command)),
            cwd=where,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    seconds = time.monotonic() - start
    print(f"{'failed after' if ended.returncode else ''}{seconds:6.0f} s")
    if ended.returncode:
        print(*log.read_text(errors="replace").splitlines()[-40:], f"All of it: {log}", sep="\n")
        raise Failed


def built() -> Path:
    """Build wheel and sdist in dist/, check what they contain, and return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    print("Wheel and sdist")
    run("environment", sys.executable, "-m", "venv", TOOLS.parent)
    run("pip", TOOLS / "pip", "install", "pip>=25.1")
    run("tools", TOOLS / "pip", "install", "--group", "dist")
    # The wheel is built from the unpacked sdist, and once more from the clone.
    run("build", TOOLS / "python", "-m", "build", "--outdir", DIST)
    run("build from clone", TOOLS / "python", "-m", "build", "--wheel", "--outdir", LOGS)
    wheel, sdist = *DIST.glob("*.whl"), *DIST.glob("*.tar.gz")
    run("twine check", TOOLS / "twine", "check", "--strict", wheel, sdist)
    same_files("the sdist", files_of_sdist(sdist), {*tracked(), "PKG-INFO"})
    same_files(
        "the wheel",
        {name for name in files_of_wheel(wheel) if ".dist-info/" not in name},
        {name for name in tracked() if name.startswith("keras_multigpu/")},
    )
    if files_of_wheel(wheel) != files_of_wheel(LOGS / wheel.name):
        print("The wheel of the sdist is not the wheel of the clone.")
        raise Failed
    return wheel


def tracked() -> set[str]:
    """The names of the files that git tracks."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return set(filter(None, listed.split("\0")))


def files_of_sdist(sdist: Path) -> set[str]:
    """The names of files in an sdist, below its top folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def files_of_wheel(wheel: Path) -> dict[str, int]:
    """A checksum of each file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def same_files(what: str, found: set[str], expected: set[str]) -> None:
    """Fail if files are missing or unexpected, and print which."""
    if found != expected:
        print(f"Not in {what}: {sorted(expected - found)}")
        print(f"In {what}, though git does not track it: {sorted(found - expected)}")
        raise Failed


def tried(version: str, wheel: Path, beside: Sequence[str] = ()) -> list[str] | None:
    """Use a wheel as a user of this Python would: the steps that failed.

    None if this machine has no such Python.
    """
    print(f"Python {version}", *beside)
    python = python_of(version)
    if python is None:
        print("  not found: neither on PATH nor in pyenv")
        return None
    environment = LOGS / f"python{version}"
    own = environment / "bin"
    mypy = (TOOLS / "mypy", "--strict", "--ignore-missing-imports", "--python-executable")
    steps = {
        "environment": (python, "-m", "venv", environment),
        "install": (own / "pip", "install", f"{wheel}[images,plots]", *beside),
        "demo": (own / "keras-multigpu", "demo"),
        "mypy": (*mypy, own / "python", "train.py"),
        "pyright": (TOOLS / "pyright", "--pythonpath", own / "python", "train.py"),
        "script": (own / "python", "train.py"),
    }
    failed = []
    # Outside of the clone, because type checkers look for settings in the folders above.
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(__file__).with_name("users_script.py"), Path(folder, "train.py"))
        for step, command in steps.items():
            try:
                run(f"{version} {step}", *command, where=Path(folder))
            except Failed:
                failed.append(step)
                if step in ("environment", "install"):
                    break
    shutil.rmtree(environment, ignore_errors=True)
    return failed


def python_of(version: str) -> str | None:
    """A Python of this minor version that can create environments."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in [sys.executable, shutil.which(f"python{version}"), *map(str, pyenv)]:
        if python and says(python) == version:
            return python
    return None


def says(python: str) -> str:
    """Its version; empty if it does not start (a shim of pyenv), or lacks `venv` or pip."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
