"""`keras-multigpu verify`: check that a model trains on N replicas as on one device."""

import argparse
from typing import Any

from keras_multigpu.checks import problem
from keras_multigpu.commands.usage import load


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
    numbers = "the numbers of replicas to compare with one device (default: 2,4; with GPUs 2,all)"
    add("--replicas", type=counts, metavar="N,N,...", help=numbers)
    add("--steps", type=int, default=10, metavar="N", help="training steps (default: 10)")
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


def counts(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 2:
        raise argparse.ArgumentTypeError(
            problem(
                "these are not numbers of replicas.",
                "Expected integers of at least 2 with commas between them.",
                "Write for example `--replicas 2,4`.",
                replicas=text,
            )
        )
    return numbers
