"""Plants the bugs of `AREA.txt`, one at a time, and says which of them no test notices.

    nice .venv/bin/python tests/bugs/plant.py callbacks [part of a file's name]

Run it before and after a change of the tests: a bug that was noticed should still be. A line with #
names the tests of the bugs that follow, `-kWORD` some of these; with the word `slow`, slow ones
too. A bug whose lines are no longer in the package is gone.
"""

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "keras_multigpu"
LONGEST = 300
"""Seconds until tests that hang count as having noticed."""


def bugs_in(text):
    """The tests, the file, the old and the new lines of each bug."""
    tests = []
    for block in re.split(r"\n\n+", text.strip()):
        lines = block.splitlines()
        if lines[0].startswith("#"):
            tests = lines.pop(0)[1:].split()
        path, *changes = lines
        old, new = ("\n".join(c[2:] for c in changes if c[0] == sign) for sign in "-+")
        yield tests, path, old, new


def find(path, old):
    """The file with these lines: the one of this path, or any, because files move."""
    files = [ROOT / path, *sorted((ROOT / PACKAGE).rglob("*.py"))]
    found = (file for file in files if file.exists() and old in file.read_text())
    return next((str(file.relative_to(ROOT)) for file in found), None)


def notices(tests, path, old, new):
    """Whether a test fails with the bug, in a process that has imported TensorFlow already."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / PACKAGE, Path(folder) / PACKAGE)
        buggy = Path(folder) / path
        buggy.write_text(buggy.read_text().replace(old, new, 1))
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            run(folder, tests)
        end = time.monotonic() + LONGEST
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.killpg(child, 9)
            time.sleep(0.1)
        return ended[1] != 0


def run(folder, tests):
    """Run tests on the package in a folder; ends the process."""
    import pytest

    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    code = 1
    which = "not gpu" if "slow" in tests else "not slow"
    paths = [each for each in tests if each != "slow"]
    with contextlib.suppress(BaseException):
        code = pytest.main([*paths, "-x", "-q", "-p", "no:cacheprovider", "-m", which])
    # No test in the group counts as unnoticed.
    os._exit(0 if code in (0, 5) else 1)


def main(area, part=""):
    """Print each bug that no test notices, and how many there are."""
    os.environ.update(
        KMG_QUICK="1",
        KERAS_BACKEND="tensorflow",
        CUDA_VISIBLE_DEVICES="-1",
        TF_CPP_MIN_LOG_LEVEL="3",
        TF_ENABLE_ONEDNN_OPTS="1",
    )
    sys.path.append(str(ROOT / "tests" / "helpers" / "quick_start"))
    import fast_keras  # noqa: F401
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    planted = noticed = 0
    sound = []
    for tests, path, old, new in bugs_in(Path(__file__).with_name(f"{area}.txt").read_text()):
        if part not in path:
            continue
        line = f"{path} | {old.split(chr(10))[0].strip()}"
        path = find(path, old)
        if path is None:
            print("gone    ", line, flush=True)
            continue
        if tests != sound and notices(tests, path, "", ""):
            raise SystemExit(f"{' '.join(tests)} fail without a bug.")
        sound, planted = tests, planted + 1
        found = notices(tests, path, old, new)
        noticed += found
        print("noticed " if found else "SURVIVES", line, flush=True)
    print(f"{noticed} of {planted} noticed")


if __name__ == "__main__":
    main(*sys.argv[1:])
