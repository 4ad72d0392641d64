"""`keras-multigpu memory`: estimate what a training step takes on each device."""

import argparse
from typing import Any

from keras_multigpu.commands.usage import at_least, load


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "memory",
        help="estimate the memory of a training step on each device",
        description="Estimate how much memory a training step takes on each device, without "
        "training. The exit code is 1 if it does not fit.",
    )
    add, name, whole = parser.add_argument, "MODULE:FUNCTION", at_least(int, 1)
    add("model", metavar=name, help="a function that returns a new compiled model")
    add("--batch-size", type=whole, required=True, metavar="N", help="the global batch size")
    add("--devices", type=whole, metavar="N", help="by default all GPUs; without GPUs one device")
    data = "a function that returns (x, y), if the inputs of the model leave lengths open"
    add("--data", metavar=name, help=data)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import keras_multigpu as kmg

    # First, because the user's modules may start TensorFlow.
    strategy = kmg.strategy(devices=arguments.devices)
    build_model = load("the model", arguments.model)
    data = load("--data", arguments.data)() if arguments.data else None
    model = kmg.distribute(build_model(), strategy)
    batch = data if isinstance(data, tuple) else (data,)
    found = kmg.memory(model, *batch, batch_size=arguments.batch_size)
    return int(found.fits is False)
