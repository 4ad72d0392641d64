"""`TrivialAugment`: what it draws, and where it runs."""

import numpy as np
from helpers.policy_checks import check_evenly_drawn, drawn_operations

from keras_multigpu.augmentation.policies.policy import OPERATIONS
from keras_multigpu.augmentation.policies.rand_augment import TrivialAugment


def test_each_image_draws_one_operation_of_any_strength():
    """Each image draws one of 14 operations and one of 31 strengths ("wide")."""
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
        # Almost all possible magnitudes are drawn.
        assert len(np.unique(distance.argmin(1))) > 0.9 * len(np.unique(sizes.round(6)))
