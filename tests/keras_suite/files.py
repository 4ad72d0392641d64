"""Which of Keras's test files run a model."""

import importlib.util
import re
from pathlib import Path

KERAS = Path(importlib.util.find_spec("keras").origin).parent / "src"
RUNS_A_MODEL = re.compile(
    r"(?<!\bre)\.(compile|fit|evaluate|predict|\w+_on_batch)\(|\brun_layer_test\("
)
# Those of other backends, and every large network with weights to download, which is not trained.
OTHERS = re.compile(r"backend/(jax|torch|numpy|openvino)/|(jax|torch)_\w+_test|applications/")


def test_files(name: str = "") -> list[str]:
    """The test files of a folder of Keras that run a model."""
    return [
        str(path)
        for path in sorted((KERAS / name).rglob("*_test.py"))
        if not OTHERS.search(path.as_posix())
        and RUNS_A_MODEL.search(path.read_text(encoding="utf-8"))
    ]
