"""What `fit` says of where a model trains."""

import logging
from typing import Any

import keras

from keras_multigpu.devices import short_name
from keras_multigpu.keras_internals import versions
from keras_multigpu.training.replication import Replication
from keras_multigpu.training.runners.tpus import TPUs

logger = logging.getLogger("keras_multigpu")


def announce(replication: Replication, model: keras.Model, verbose: Any = 0) -> None:
    """Log once where the model trains, or print it next to Keras's progress bars."""
    group, elsewhere = replication.group, replication.elsewhere
    if not group.is_chief:
        return
    names = ", ".join(short_name(replica.device) for replica in group.replicas)
    names, count = elsewhere.name if elsewhere else names, replication.shares_of_batch
    replicas = "1 replica" if count == 1 else f"{count} replicas"
    if group.is_spread:
        names = f"{names} on each of {len(group.workers)} workers"
    shows = verbose != 0 and keras.config.is_interactive_logging_enabled()
    shown = [f"Training on {replicas}: {names}.", text_on_xla(replication, model)]
    for text in (*shown, versions.newer_than_tested()):
        if not text or text in replication.warned_of:
            continue
        replication.warned_of.add(text)
        logger.info(text)
        if shows and text in shown and not logger.isEnabledFor(logging.INFO):
            print(text, flush=True)  # noqa: T201 (as Keras does)


def text_on_xla(replication: Replication, model: keras.Model) -> str:
    """What to say of XLA where Keras would use it on one device, or the user asks for it."""
    is_off = replication.options.xla is False or not keras.Model.jit_compile.fget(model)
    if is_off or isinstance(replication.elsewhere, TPUs):
        return ""
    if replication.is_one_program:
        return "XLA: on. It compiles the step for each batch size."
    programs = "a program for each stage of a step, replica and batch size"
    if replication.may_use_xla:
        return f"XLA: on, as asked for. It compiles {programs}."
    return (
        'XLA: off. On one device Keras\'s jit_compile="auto" would turn it on; here it would '
        f"compile {programs}. `compile(jit_compile=True)` after `distribute` turns it on."
    )
