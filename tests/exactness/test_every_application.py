"""A network of each family of `keras.applications` trains as on one device."""

import inspect
from typing import Any

import keras
import numpy as np
import pytest
from helpers.all_replicas import first_rows
from keras import layers, optimizers

from exactness.cases import Case
from exactness.models import in_precision
from exactness.runs import require_equal

pytestmark = pytest.mark.usefixtures("graphs_that_run_twice")

# One of each family of `keras.applications`: the side of its images, and what makes it small.
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ConvNeXtTiny": (32, {}),
    "DenseNet121": (32, {}),
    "EfficientNetB0": (32, {}),
    "EfficientNetV2B0": (32, {}),
    "InceptionResNetV2": (75, {}),
    "InceptionV3": (75, {}),
    "MobileNet": (32, {"alpha": 0.25}),
    "MobileNetV2": (32, {"alpha": 0.35}),
    "MobileNetV3Small": (32, {}),
    "NASNetMobile": (32, {}),
    "ResNet50": (32, {}),
    "ResNet50V2": (32, {}),
    "VGG16": (32, {}),
    "VGG19": (32, {}),
    "Xception": (71, {}),
}


def test_every_family_has_a_row():
    """A family is what Keras has in one file."""
    found = vars(keras.applications)
    kinds = {value.__module__ for value in found.values() if inspect.isfunction(value)}
    assert kinds == {found[name].__module__ for name in FAMILIES}


# They take from five seconds to a minute; their layers are tried in test_every_layer.py.
@pytest.mark.parametrize("name", first_rows(FAMILIES))
def test_a_family(name):
    """Deep networks multiply rounding, so they compute in double precision."""
    require_equal(trained(name, "float64"))


def trained(name: str, policy: str) -> Case:
    """The training of a family's network in this precision."""
    side, options = FAMILIES[name]

    def network() -> keras.Model:
        kind, shape = getattr(keras.applications, name), (side, side, 3)
        body = kind(weights=None, include_top=False, pooling="avg", input_shape=shape, **options)
        return keras.Sequential([keras.Input(shape), body, layers.Dense(3)])

    images = np.random.default_rng(0).uniform(0, 1, size=(3, side, side, 3))
    return Case(
        "",
        lambda: in_precision(policy, network),
        lambda: {"optimizer": optimizers.SGD(0.01), "loss": "mse"},
        lambda: (images, np.ones((3, 3)), None),
        batch_size=3,
        fit=lambda directory: {"epochs": 1},
        after=(),
    )
