"""`AugMix`: what it draws, how chains are mixed, and its arguments."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from helpers.layer_checks import drawn_for, seeds_for
from helpers.policy_checks import check_evenly_drawn, levels

from keras_multigpu.augmentation.policies.aug_mix import AugMix
from keras_multigpu.augmentation.policies.policy import OPERATIONS
from keras_multigpu.augmentation.random_numbers import Draws, dirichlet

# The operations of the paper.
NINE = (
    "auto_contrast",
    "equalize",
    "posterize",
    "rotate",
    "solarize",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)


def test_chains_are_drawn_for_each_image():
    drawn = drawn_for(AugMix(), (2000, 30, 30, 3))
    names = np.array(OPERATIONS)[drawn["operation"].numpy()]
    assert names.shape == (2000, 3, 3)
    check_evenly_drawn(names[..., 0], NINE)
    depths = (names != "identity").sum(-1)
    # Identities stand only at the end of a chain.
    np.testing.assert_array_equal(names[..., 1] != "identity", depths > 1)
    np.testing.assert_allclose(
        np.bincount(depths.ravel()) / depths.size, [0, *[1 / 3] * 3], atol=0.04
    )
    magnitudes = drawn["magnitude"].numpy()
    degrees = magnitudes[names == "rotate"]
    assert 8.5 < degrees.max() <= 9
    assert -9 <= degrees.min() < -8.5
    assert 2.9 < np.abs(magnitudes[names == "translate_x"]).max() <= 3
    assert set(np.unique(magnitudes[names == "posterize"])) == {3, 4}


def test_shares_and_mixtures_have_the_distributions_of_the_paper():
    drawn = drawn_for(AugMix(), (2000, 8, 8, 3))
    assert scipy.stats.kstest(drawn["mixture"], "uniform").pvalue > 0.001
    shares = drawn["shares"].numpy()
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-5)
    for share in shares.T:
        assert scipy.stats.kstest(share, "beta", (1, 2)).pvalue > 0.001


@pytest.mark.parametrize("alpha", (0.2, 0.9, 1.0, 4.0))
def test_shares_follow_a_dirichlet_distribution(alpha):
    """Each of three shares has the distribution Beta(alpha, 2 alpha)."""
    shares = dirichlet(Draws(seeds_for(3000)), alpha, 3).numpy()
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-5)
    assert scipy.stats.kstest(shares[:, 1], "beta", (alpha, 2 * alpha)).pvalue > 0.001


def test_chains_are_mixed_by_their_shares():
    images = levels((2, 6, 6, 3))
    solarize, posterize = OPERATIONS.index("solarize"), OPERATIONS.index("posterize")
    drawn = {
        "mixture": tf.constant([0.5, 0.0]),
        "shares": tf.constant([[0.25, 0.75], [1.0, 0.0]]),
        "operation": tf.constant([[[solarize, 0], [posterize, solarize]]] * 2),
        "magnitude": tf.constant([[[0.0, 0.0], [1.0, 0.0]]] * 2),
    }
    result = AugMix(2, 2).apply(images, drawn)
    first, second = 255 - images[0], 255 - images[0] // 128 * 128
    expected = 0.5 * images[0] + 0.125 * first + 0.375 * second
    np.testing.assert_allclose(result[0], expected, rtol=1e-5)
    np.testing.assert_allclose(result[1], images[1], rtol=1e-6)
    text = AugMix(2, 2).drawn_text({name: value[0].numpy() for name, value in drawn.items()})
    assert text == "12% solarize 0 + 38% posterize 1, solarize 0"


@pytest.mark.in_test_all("test_independent_draws.py shows it for layers of one kind")
def test_every_call_draws_other_chains():
    """One traced function changes equal images differently, within a batch and between calls."""
    layer = AugMix(2, 1, seed=0)
    image = levels((1, 12, 12, 3))
    images = tf.constant(np.repeat(image, 4, axis=0))
    changed = tf.function(lambda images: layer(images, training=True))
    first, second = changed(images).numpy(), changed(images).numpy()
    assert (first != second).any((1, 2, 3)).all()
    assert (first[:-1] != first[1:]).any((1, 2, 3)).all()
