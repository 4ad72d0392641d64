"""The verdict: which part of a step limits the speed, and which knobs change it."""

from typing import Any

import keras

from keras_multigpu.callbacks.throughput_report.report import Throughput
from keras_multigpu.data.batches import Batches

NOTABLE = 0.2
"""A part of the step other than computation that is worth a verdict."""

NAMES = {
    "data_wait": "input-bound: {share:.0%} waiting",
    "all_reduce": "communication-bound: {share:.0%} in the all-reduce",
    "host": "host-bound: {share:.0%} outside of the devices",
    "straggler": "held up by the slowest replica: {share:.0%} waiting for it",
    "compute": "compute-bound: {share:.0%} computing",
    "step": "bound by the step: {share:.0%} in it",
}

UNSEEN = ". What happens inside your own `train_step` is not seen"


def verdict_on(found: Throughput, model: keras.Model, data: Any) -> str:
    """What limits the speed and what to try, in one sentence."""
    if not found.steps:
        return "Nothing was measured: every step of the epoch was compiled. Train for longer."
    shares = dict(found.shares)
    shares["straggler"] = found.straggler / found.wall if found.wall else 0.0
    inside = "step" if "step" in shares else "compute"
    candidates = {k: v for k, v in shares.items() if k != inside and v >= NOTABLE}
    limit = max(candidates, key=lambda name: candidates[name]) if candidates else inside
    tries = {
        "data_wait": faster_input(data),
        "all_reduce": less_communication(model),
        "host": less_dispatch(model),
        "straggler": [
            "`ReplicaMetrics`, which names the replica",
            "a look at what else runs on its device",
        ],
        "compute": faster_steps(model),
        "step": faster_steps(model),
    }[limit]
    told = NAMES[limit].format(share=shares[limit])
    return f"{told}; try {', '.join(tries)}{UNSEEN if inside == 'step' else ''}"


def faster_input(data: Any) -> list[str]:
    if isinstance(data, Batches):
        settings = repr(data)
        tries = [] if "cache=" in settings else ['cache="memory" or a folder']
        tries.append("a larger replica batch")
        if "augment=" in settings:
            tries.append("the augmentation as first layers of the model")
        if data.file_paths:
            tries.append('resize="random_crop" or a smaller image_size= when the files are read')
        return tries
    return [
        "the data through one of `kmg.data.from_*`, with cache=",
        "`.cache()` and `.prefetch(tf.data.AUTOTUNE)` on a dataset of your own",
        "a larger replica batch",
    ]


def less_communication(model: keras.Model) -> list[str]:
    tries = ["a larger replica batch (micro_batches= where memory is short)"]
    # Also in mixed precision: gradients travel in the type of the variables, which is float32.
    if not model.replication.half_sums:
        tries.append('kmg.distribute(sum_dtype="bfloat16"), which rounds gradients')
    tries.append("faster links between the devices, or fewer devices")
    return tries


def less_dispatch(model: keras.Model) -> list[str]:
    tries = []
    if model.run_eagerly:
        tries.append("compile(run_eagerly=False)")
    elif model.steps_per_execution == 1:
        # Where a step is all dispatch this takes it from 1.4 ms to 1.2; see docs/benchmarks.md.
        tries.append("compile(steps_per_execution=8)")
    if not model.jit_compile and not model.run_eagerly:
        tries.append("compile(jit_compile=True)")
    tries.append("a larger replica batch")
    tries.append("callbacks that do less after each step")
    return tries


def faster_steps(model: keras.Model) -> list[str]:
    tries = []
    if model.compute_dtype == "float32":
        tries.append('mixed precision: keras.config.set_dtype_policy("mixed_bfloat16")')
    if not model.jit_compile and not model.run_eagerly:
        tries.append("compile(jit_compile=True)")
    tries.append("more devices")
    return tries
