"""TensorFlow starts here once, with eight logical CPU devices for all tests and no GPU."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The same tests on every machine; set the variable to see the GPUs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)
