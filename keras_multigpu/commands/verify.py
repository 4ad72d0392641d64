"""`keras-multigpu verify`: check that a model trains on N replicas as on one device."""

import argparse
from typing import Any

from keras_multigpu.commands.usage import at_least, load


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="train a model on one device and on N replicas, and compare",
        description="Train a model on one device and on N replicas, from the same weights and "
        "seeds and on the same batches, and print whether they agree. The exit code is 0 if all "
        "agree, 1 if something differs, 2 if the comparison could not be made.",
    )
    add, name = parser.add_argument, "MODULE:FUNCTION"
    add("model", metavar=name, help="a function that returns a new compiled model")
    data = "a function that returns (x, y) or a batched tf.data.Dataset"
    add("--data", metavar=name, required=True, help=data)
    numbers = "numbers of replicas to compare with one device (default: 2 4; with GPUs 2 and all)"
    add("--replicas", type=at_least(int, 2), nargs="+", metavar="N", help=numbers)
    steps = "training steps (default: 10)"
    add("--steps", type=at_least(int, 1), default=10, metavar="N", help=steps)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import keras_multigpu as kmg

    verify = kmg.verify  # Raises if Keras does not run on TensorFlow.
    from keras_multigpu.verification.in_this_process import devices_are_ready, usual_replicas

    replicas = arguments.replicas or usual_replicas()
    # First, because the user's modules may start TensorFlow.
    devices_are_ready(max(replicas))
    build_model = load("the model", arguments.model)
    data = load("--data", arguments.data)
    result = verify(build_model, data, replicas=replicas, steps=arguments.steps)
    return 0 if result.agrees else 1
