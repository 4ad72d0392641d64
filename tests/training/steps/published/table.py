"""Steps that people publish, each in a few lines and with a handful of weights.

A row of `PUBLISHED` is a `Case` that trains one epoch of three batches, of which the last is
smaller; `gathers` names the operations for which replicas may gather rows, which is what a change
of the partition must not add to.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from exactness import models as made
from exactness.cases import Case
from keras import layers

from published.contrastive import (
    Anchors,
    Barlow,
    Clip,
    Moco,
    Moments,
    NearestNeighbours,
    SimClr,
    SupervisedContrast,
    Towers,
    Triplets,
    captions,
)
from published.gradients import (
    Adaptive,
    Collected,
    Count,
    Graph,
    OneByOne,
    Physics,
    Places,
    Positives,
    Private,
    Sharpness,
    Teacher,
)
from published.learner import BATCH, ROWS, ROWS_OF_SIX, classes, draws, pictures
from published.of_layers import (
    AlongTheBatch,
    ListedInStep,
    ListedLosses,
    Ragged,
    Rematerialized,
    Router,
    augmented,
    colors,
    contrast,
    listed,
    listener,
    of_body,
    reader,
    sentences,
    sequential,
    sounds,
    sparse,
    sparse_net,
    speller,
    text_reader,
    texts,
    two_targets,
    unbiased,
)
from published.of_state import Novelty, Process, Queue, Survival, lives
from published.random_draws import (
    Codebook,
    Diffusion,
    DropPath,
    Gan,
    Mixup,
    adversaries,
    autoencoder,
)


@dataclasses.dataclass(frozen=True)
class Published(Case):
    """A published step.

    Args:
        gathers: The types of operations for which rows are gathered.
        alone: Whether one replica takes the whole batch.
        in_graph: Whether it needs a graph in plain Keras, too.
    """

    model: Callable[[], keras.Model] = made.mlp
    batch_size: int = BATCH
    fit: Callable[[Any], dict[str, Any]] = lambda directory: {"epochs": 1}
    after: tuple[str, ...] = ()
    gathers: frozenset[str] = frozenset()
    alone: bool = False
    in_graph: bool = False


def own(name, model, data=ROWS_OF_SIX, gathers="", **more):
    """A row for a `train_step` of its own, with an optimizer alone."""
    compiled = more.pop("compile", lambda: {"optimizer": sgd(), "jit_compile": False})
    return Published(name, model, compiled, data, gathers=frozenset(gathers.split()), **more)


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def usual(loss="mse", **options):
    return lambda: {"optimizer": sgd(), "loss": loss, "jit_compile": False, **options}


def layered(name, model, data=ROWS_OF_SIX, gathers="", loss="mse", **options):
    """A row for Keras's own step."""
    alone = options.pop("alone", False)
    return own(name, model, data, gathers, compile=usual(loss, **options), alone=alone)


LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

PUBLISHED = [
    own("SimCLR", contrast(SimClr), gathers="MatMul"),
    own("SupCon", contrast(SupervisedContrast), classes(), gathers="Equal MatMul"),
    own("NNCLR", NearestNeighbours, gathers="ConcatV2 MatMul"),
    own("MoCo", Moco, gathers="ConcatV2"),
    own("CLIP", Clip, captions, gathers="MatMul SparseSoftmaxCrossEntropyWithLogits"),
    own("two towers", Towers, classes(), gathers="Equal MatMul Sub"),
    own("Barlow Twins", unbiased(Barlow)),
    own("triplets", of_body(Triplets, 8, 4), classes(), gathers="Equal MatMul"),
    own(
        "metric learning",
        of_body(Anchors, 8, 4),
        lambda: (draws(6, 5, 6), np.zeros((6, 1), "float32"), None),
        batch_size=2,
    ),
    own("MMD", of_body(Moments, 8, 3), gathers="Sub"),
    own("DDIM", Diffusion),
    own("GAN", Gan, compile=adversaries),
    layered("VAE", autoencoder),
    layered("VQ-VAE", sequential(lambda: layers.Dense(3), Codebook)),
    layered("stochastic depth", sequential(lambda: DropPath(layers.Dense(6)))),
    own("mixup", Mixup, classes(), gathers="GatherV2"),
    own("SAM", of_body(Sharpness, 8, 1)),
    own("gradient accumulation", Collected, in_graph=True),
    own("clipping by unit", of_body(Adaptive, 8, 1)),
    own("gradients of each row", of_body(Private, 4, 1), gathers="Reshape Transpose"),
    own("second derivatives", of_body(Physics, 4, 1)),
    own("mean teacher", Teacher, classes()),
    own("places of rows", of_body(Places, 8, 1), gathers="Roll"),
    own("number of rows", of_body(Count, 8, 1), gathers="StatelessWhile"),
    own("mapped functions", of_body(OneByOne, 4, 1), gathers="TensorListFromTensor"),
    own("graph", of_body(Graph, 4, 1), gathers="GatherV2"),
    own("slices of a queue", Queue, classes(), gathers="ResourceScatterNdAdd StridedSlice"),
    own("counts in a table", Novelty, classes(), gathers="UniqueWithCounts"),
    own("Gaussian process", unbiased(Process), gathers="Cholesky MatrixTriangularSolve Sub"),
    own("Cox", of_body(Survival, 8, 1), lives, gathers="GatherV2 TopKV2"),
    own("focal sum", of_body(Positives, 4, 2), classes()),
    layered("experts with capacity", sequential(Router), gathers="Cumsum"),
    own("CTC by add_loss", listener, sounds),
    layered("remat", Rematerialized),
    layered("masks", reader, lambda: made.words(ROWS)),
    layered("strings", speller, colors),
    layered("texts", text_reader, texts, alone=True),
    layered("ragged", Ragged, sentences, gathers="GatherV2"),
    layered("sparse", sparse_net, sparse, gathers="Sub"),
    layered("along the batch", sequential(AlongTheBatch), gathers="Softmax"),
    layered("augmentation in the model", augmented, pictures(), loss=LOGITS),
    layered("losses of a list", listed(ListedLosses), two_targets, loss=["mse", "bce"]),
    layered("losses of a list in a step", listed(ListedInStep), two_targets, loss=["mse", "bce"]),
]
BY_NAME = {case.name: case for case in PUBLISHED}
