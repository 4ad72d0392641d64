"""What there is: versions and devices."""

import platform

import keras
import tensorflow as tf
from machine import KIND, Check, Row, devices


def checks() -> dict[str, Check]:
    return {"machine": machine}


def machine() -> list[Row]:
    """Facts, of which one is judged: whether there are at least two devices."""
    chips = tf.config.list_physical_devices(KIND)
    names = devices()
    details = [tf.config.experimental.get_device_details(chip) for chip in chips]
    build = tf.sysconfig.get_build_info()
    return [
        Row("Python", "", platform.python_version()),
        Row("TensorFlow", "", tf.__version__),
        Row("Keras", "", keras.__version__),
        Row("CUDA, cuDNN", "", [build.get("cuda_version"), build.get("cudnn_version")]),
        Row("chips", "", [each.get("device_name", KIND) for each in details]),
        Row("capabilities", "", [each.get("compute_capability") for each in details]),
        Row("devices", "2 or more", names, len(tf.config.list_logical_devices(KIND)) > 1),
        Row("parts of one chip", "", len(chips) < len(names)),
    ]
