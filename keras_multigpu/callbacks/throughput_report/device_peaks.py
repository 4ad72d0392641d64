"""How many operations a second GPUs can do at most, as their maker states it.

Dense figures, without the sparsity that doubles many of the printed numbers, in 10^12 a second:

    V100S     https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    V100      https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    T4        https://www.nvidia.com/en-us/data-center/tesla-t4/
    A100      https://www.nvidia.com/en-us/data-center/a100/
    A10       https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    A40       https://www.nvidia.com/en-us/data-center/a40/
    L4, L40S  https://www.nvidia.com/en-us/data-center/l4/, .../l40s/
    H100      https://www.nvidia.com/en-us/data-center/h100/
    H200      https://www.nvidia.com/en-us/data-center/h200/
"""  # noqa: E501

import re
from typing import NamedTuple

import keras
import tensorflow as tf


class Peak(NamedTuple):
    """Operations a second, in units of 10^12.

    Attributes:
        half: In 16 bits, on tensor cores.
        tensor_float: In float32 with TensorFloat-32, which TensorFlow uses where it can.
        single: In float32 without.
    """

    half: float
    tensor_float: float
    single: float


# A longer name comes before one that it contains.
PEAKS = {
    r"V100S": Peak(130.0, 16.4, 16.4),
    r"V100-PCIE": Peak(112.0, 14.0, 14.0),
    r"V100-SXM2": Peak(125.0, 15.7, 15.7),
    r"\bT4\b": Peak(65.0, 8.1, 8.1),
    r"\bA100\b": Peak(312.0, 156.0, 19.5),
    r"\bA10\b": Peak(125.0, 62.5, 31.2),
    r"\bA40\b": Peak(149.7, 74.8, 37.4),
    r"\bL4\b": Peak(121.0, 60.0, 30.3),
    r"\bL40S\b": Peak(362.05, 183.0, 91.6),
    r"\bH100 PCIe\b": Peak(756.0, 378.0, 51.0),
    r"\bH100 80GB HBM3\b": Peak(989.4, 494.7, 67.0),
    r"\bH200\b(?! NVL)": Peak(989.4, 494.7, 67.0),
}
"""By a part of the name that TensorFlow tells."""

PARTS = r"\b(MIG|GRID)\b"
"""Names of these are of a part of a GPU, which has a part of the peak."""


def peak_of(name: str, dtype: str, tensor_float: bool = True) -> float | None:
    """The operations a second of a device at most; None if it is not known.

    Args:
        name: Its name, for example "NVIDIA A100-SXM4-80GB".
        tensor_float: Whether TensorFlow may use TensorFloat-32.
    """
    if re.search(PARTS, name):
        return None
    for pattern, peak in PEAKS.items():
        if re.search(pattern, name):
            if dtype in ("float16", "bfloat16"):
                return None if dtype == "bfloat16" and old(pattern) else peak.half * 1e12
            if dtype == "float32":
                return (peak.tensor_float if tensor_float else peak.single) * 1e12
    return None


def old(pattern: str) -> bool:
    """Whether these GPUs have no tensor cores for bfloat16."""
    return "V100" in pattern or "T4" in pattern


def peak_of_devices(devices: list[str], model: keras.Model) -> float | None:
    """The operations a second of all devices together; None if one is not known."""
    if not all(":GPU:" in device for device in devices):
        return None
    # TensorFlow counts the visible GPUs only.
    visible = tf.config.get_visible_devices("GPU")
    if len(tf.config.list_logical_devices("GPU")) != len(visible):
        # A GPU is split into several devices, which share its peak.
        return None
    names = []
    for device in devices:
        index = int(device.rpartition(":")[2])
        if index >= len(visible):
            return None
        details = tf.config.experimental.get_device_details(visible[index])
        names.append(details.get("device_name", ""))
    tensor_float = tf.config.experimental.tensor_float_32_execution_enabled()
    dtype = model.compute_dtype if hasattr(model, "compute_dtype") else keras.config.floatx()
    peaks = [peak_of(name, dtype, tensor_float) for name in names]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None
