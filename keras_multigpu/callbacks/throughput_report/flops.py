"""The arithmetic of a training step, and what GPUs could do at most."""

import re

import keras
import tensorflow as tf

from keras_multigpu.explanation.planning import last_step
from keras_multigpu.partition.sizes import value_of
from keras_multigpu.training.steps.batches import BATCH

# Tera-operations a second without sparsity, from NVIDIA's data sheets of each GPU: in float16 and
# bfloat16 (float16 only, where there is no TF32), in TF32, and in float32. The more special name
# comes first.
PEAKS: dict[str, tuple[float, float | None, float]] = {
    "B200": (2250, 1125, 75),
    "H200 NVL": (835, 417, 60),
    "H200": (989, 494, 67),
    "H100 NVL": (835, 417, 60),
    "H100 PCIe": (756, 378, 51),
    "H100": (989, 494, 67),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "A100": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165, 82, 10.3),
    "A10": (125, 62.5, 31.2),
    "T4": (65, None, 8.1),
    "V100-PCIE": (112, None, 14),
    "V100": (125, None, 15.7),
    "P100-PCIE": (18.7, None, 9.3),
}


def step_flops(model: keras.Model, examples: float) -> int | None:
    """The operations of all products and convolutions of a step, forward and backward.

    None if they are not known, as in loops that end by themselves.
    """
    step = last_step(model)
    if step is None or step.local is None:
        return None
    work = [each.flops for each in step.cost.work]
    own = step.inputs.size
    # Without other replicas nothing tells the batch from other axes of unknown length.
    names = [BATCH, *(f"axis_0_of_{n}" for n in range(len(step.inputs.leaves)))]
    numbers = dict.fromkeys(names, own if isinstance(own, int) else 1)
    try:
        whole = sum(value_of(each, numbers) for each in work if each is not None)
    except KeyError:
        return None
    if None in work or not whole:
        return None
    return round(whole * examples / numbers[BATCH])


def peak_flops(device: str, dtype: str) -> float | None:
    """The most operations a second of a GPU, such as `GPU:0`, in this type; None if unknown."""
    gpus = tf.config.get_visible_devices("GPU")
    if "GPU" not in device or len(gpus) != len(tf.config.list_logical_devices("GPU")):
        return None
    gpu = gpus[int(device.rpartition(":")[2])]
    name = tf.config.experimental.get_device_details(gpu).get("device_name", "")
    return peak_of(name, dtype, tf.config.experimental.tensor_float_32_execution_enabled())


def peak_of(name: str, dtype: str, uses_tf32: bool) -> float | None:
    """The peak of a GPU with this name, such as "NVIDIA A100-SXM4-40GB"."""
    found = (PEAKS[each] for each in PEAKS if re.search(rf"\b{each}\b", name))
    half, tf32, single = next(found, (None, None, None))
    if "MIG" in name or single is None:
        return None
    by_type = {
        "float16": half,
        "bfloat16": half if tf32 else None,
        "float32": tf32 if tf32 and uses_tf32 else single,
    }
    peak = by_type.get(dtype)
    return None if peak is None else peak * 1e12
