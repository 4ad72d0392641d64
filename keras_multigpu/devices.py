"""TensorFlow's devices: their number and names, and logical CPU devices."""

import re
from collections.abc import Sequence

import tensorflow as tf

from keras_multigpu.checks import require_positive_integer, runtime_error, value_error


def device_count(device_type: str) -> int:
    """How many logical devices of a type, `"GPU"` or `"CPU"`, TensorFlow has or will have."""
    return sum(
        # `tf.config.list_logical_devices` would start TensorFlow.
        len(tf.config.get_logical_device_configuration(device) or [device])
        for device in tf.config.get_visible_devices(device_type)
    )


def require_logical_cpus(count: int) -> None:
    """Make at least `count` logical CPU devices; a `RuntimeError` if it is too late."""
    present = device_count("CPU")
    if present >= count:
        return
    try:
        tf.config.set_logical_device_configuration(
            tf.config.get_visible_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * count,
        )
    except RuntimeError as error:
        raise runtime_error(
            f"{count} logical CPU devices are needed, but TensorFlow started with {present}.",
            "Expected to make them before TensorFlow's first operation.",
            "Restart Python (in a notebook: the kernel) and call "
            f"`keras_multigpu.strategy(devices={count})` before the first model, tensor or "
            "dataset; ask for the largest number first. In one of several workers leave `devices` "
            "out: `keras-multigpu launch --devices-per-worker` splits the CPU.",
            devices=count,
        ) from error


def short_name(device: str) -> str:
    """`GPU:0` of `/job:localhost/replica:0/task:0/device:GPU:0`."""
    return device.rpartition("device:")[2].lstrip("/")


def forget_peaks() -> None:
    """Reset the memory peaks of all GPUs."""
    for device in tf.config.list_logical_devices("GPU"):
        tf.config.experimental.reset_memory_stats(device.name)


def memory_peak(device: str) -> int | None:
    """The most bytes that a GPU has held since `forget_peaks`; None for other devices."""
    if "GPU" not in device:
        return None
    return int(tf.config.experimental.get_memory_info(short_name(device))["peak"])


def device_names(devices: object) -> tuple[str, ...]:
    """Normalize `devices` to distinct names of one type, such as `("GPU:0", "GPU:1")`."""
    if isinstance(devices, int):
        require_positive_integer("devices", devices)
        device_type = "GPU" if device_count("GPU") else "CPU"
        return tuple(f"{device_type}:{index}" for index in range(devices))
    if not isinstance(devices, list | tuple) or not devices:
        raise _devices_error("`devices` is neither a number nor a list with names in it.", devices)
    names = []
    for device in devices:
        # TensorFlow also writes "/device:GPU:0" and "/job:localhost/.../device:GPU:0".
        match = re.fullmatch(r"(?:.*/)?(?:device:)?(GPU|CPU):(\d+)", str(device), re.IGNORECASE)
        if match is None:
            raise _devices_error(f"There is no device named {device!r}.", devices)
        names.append(f"{match[1].upper()}:{int(match[2])}")
    if len(set(names)) < len(names):
        raise _devices_error("`devices` names a device twice.", devices)
    if len({name[:3] for name in names}) > 1:
        raise _devices_error("`devices` mixes GPUs and CPUs.", devices)
    return tuple(names)


def _devices_error(what: str, devices: object) -> ValueError:
    return value_error(
        what,
        'Expected a number, or distinct names of one type, such as ["GPU:0", "GPU:1"].',
        devices=devices,
    )


def require_gpus(names: Sequence[str]) -> None:
    if max(int(name[4:]) for name in names) >= device_count("GPU"):
        raise value_error(
            "`devices` asks for more GPUs than there are.",
            f"Expected at most the {device_count('GPU')} GPUs that TensorFlow sees.",
            "Ask for fewer, or check `nvidia-smi` and CUDA_VISIBLE_DEVICES.",
            devices=names,
        )


def share_a_chip(names: Sequence[str]) -> bool:
    """Whether two of these GPUs are logical parts of one physical GPU."""
    chips = [
        chip.name
        for chip in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(chip) or [chip]
    ]
    used = [chips[int(name[4:])] for name in names]
    return len(set(used)) < len(used)
