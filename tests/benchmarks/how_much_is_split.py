"""How many models split whole, gather something, or are left to one replica.

    python tests/benchmarks/how_much_is_split.py [--write]

It counts what the tables of the tests say of each row. `make test-all` trains all of them, and
fails if a row gathers anything else or is not equal to one device's.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KMG_ALL_REPLICAS", "1")

from report import main

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))


def tables() -> dict[str, dict[str, str]]:
    """What each row of each table gathers; "alone" if one replica takes the whole batch."""
    from exactness import test_every_layer as layers
    from exactness import test_keras_hub as hub
    from exactness.cases import CASES
    from exactness.test_every_application import FAMILIES

    words = {
        name: "ResourceScatterSub" if isinstance(hub.model_of(name).input, dict) else ""
        for name in hub.MODELS
    }
    return {
        "trainings of many kinds": {case.name: case.gathers for case in CASES},
        "layers of Keras": {name: layers.GATHERS.get(name, "") for _, name in layers.NAMES},
        "families of `keras.applications`": dict.fromkeys(FAMILIES, ""),
        "families of keras-hub": {n: words[n] + hub.TORN.get(n, "") for n in hub.MODELS},
    }


def shares(rounds: int) -> Iterator[tuple[str, ...]]:
    """A row for each table."""
    for title, table in tables().items():
        alone = [name for name, kinds in table.items() if "alone" in kinds]
        gather = [name for name, kinds in table.items() if kinds and name not in alone]
        whole = len(table) - len(alone) - len(gather)
        yield title, str(len(table)), str(whole), named(gather), named(alone)


def named(names: list[str]) -> str:
    """How many there are, and their names if they are few."""
    return f"{len(names)}: {', '.join(names)}" if 0 < len(names) < 9 else str(len(names))


if __name__ == "__main__":
    main(__doc__, {"split": ("of | rows | split whole | gather something | one replica", shares)})
