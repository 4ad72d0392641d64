"""XLA on, off and as Keras chooses: programs compiled, times to the first steps, and the losses.

Each training has a process of its own, in which XLA writes down every program that it compiles.
Stock Keras fails with XLA on several devices; that is its result.
"""

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import CPU, Check, Row, devices, in_a_process_of_its_own
from networks import BATCH, batches, images, made

MODES: dict[str, Any] = {"on": True, "auto": "auto", "off": False}
LIMIT = 1e-3
"""Between the losses of two steps: XLA adds in another order."""
SYSTEMS = ("ours",) if CPU else ("ours", "stock")


def checks() -> dict[str, Check]:
    return {f"XLA {mode}": partial(compared, mode) for mode in MODES}


def compared(mode: str) -> list[Row]:
    one, *_ = found = [compiled("one", mode), *(compiled(each, mode) for each in SYSTEMS)]
    rows = []
    for system, each in zip(("one", *SYSTEMS), found, strict=True):
        if "error" in each:
            rows.append(Row(f"{mode}, {system}", "", each["error"], system == "stock" and None))
            continue
        worst = max(abs(a - b) / abs(a) for a, b in zip(one["losses"], each["losses"], strict=True))
        rows += [
            Row(f"{mode}, {system}: programs", "", each["programs"]),
            Row(f"{mode}, {system}: seconds to steps of two sizes", "", each["seconds"]),
        ]
        if system != "one":
            ok = None if system == "stock" else worst <= LIMIT
            rows.append(Row(f"{mode}, {system}: losses", f"<= {LIMIT:g}", worst, ok))
    return rows


def compiled(system: str, mode: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        own = os.environ.get("XLA_FLAGS", "")
        flags = f"{own} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        try:
            found: dict[str, Any] = in_a_process_of_its_own(
                "xla", "first_steps", system, mode, XLA_FLAGS=flags
            )
        except RuntimeError as error:
            return {"error": str(error)[-300:]}
        found["programs"] = len(list(Path(folder).glob("*before_optimizations.txt")))
    return found


def first_steps(system: str, mode: str) -> dict[str, Any]:
    """Seconds and losses of the first step, and of the first one with fewer examples."""
    model, found = made(system, devices(), jit=MODES[mode]), {"seconds": [], "losses": []}
    for size in (BATCH, BATCH // 2 + 1):
        began = time.perf_counter()
        history = model.fit(batches(images(batch=size), 1), verbose=0).history
        found["seconds"].append(round(time.perf_counter() - began, 1))
        found["losses"] += [float(np.ravel(history["loss"])[0])]
    return found
