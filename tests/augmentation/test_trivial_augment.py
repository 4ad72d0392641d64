"""`TrivialAugment`: what it draws, and where it runs."""

import numpy as np
import pytest
from helpers.layer_checks import (
    SHAPES,
    check_config,
    check_host_and_model_agree,
    check_replays,
    check_saved_model,
    pictures,
)
from helpers.policy_checks import check_evenly_drawn, drawn_operations

from keras_multigpu.augmentation.policies.draws import OPERATIONS
from keras_multigpu.augmentation.trivial_augment import TrivialAugment


@pytest.mark.slow
def test_promises_of_all_layers():
    """Those that what it draws can break; the others are those of any policy."""
    layer, images = TrivialAugment(seed=3), pictures(SHAPES[0])
    check_config(layer)
    check_host_and_model_agree(layer, images, 0.255)
    check_replays(layer, images)


@pytest.mark.slow
def test_saved_model(tmp_path):
    """A model with the layer is saved and loaded."""
    check_saved_model(TrivialAugment(seed=1), tmp_path)


def test_one_operation_of_any_strength():
    """Each image draws one of 14 operations, and its strength evenly from 31 ("wide")."""
    names, magnitudes = drawn_operations(TrivialAugment(), count=6000)
    assert names.shape == (6000, 1)
    check_evenly_drawn(names, OPERATIONS)
    steps = np.arange(31) / 30
    factors = np.concatenate([1 - 0.99 * steps, 1 + 0.99 * steps])
    for name, sizes in {
        "rotate": np.concatenate([-135 * steps, 135 * steps]),
        "shear_x": np.concatenate([-0.99 * steps, 0.99 * steps]),
        "translate_x": np.concatenate([-32 * steps, 32 * steps]),
        "translate_y": np.concatenate([-32 * steps, 32 * steps]),
        "solarize": 255 * (1 - steps),
        "posterize": np.arange(2, 9),
        "color": factors,
        "sharpness": factors,
    }.items():
        drawn = magnitudes[names == name]
        distance = np.abs(drawn[:, None] - np.unique(sizes)[None])
        assert distance.min(1).max() < 1e-4
        # Of all magnitudes that are possible, almost all are drawn.
        assert len(np.unique(distance.argmin(1))) > 0.9 * len(np.unique(sizes.round(6)))
