"""`ImageDataGenerator` draws from our generator."""

import numpy as np

from keras_multigpu.keras_internals.flow_internals import drawn_transform, legacy_images


def test_image_data_generator_draws_from_our_generator():
    """Its module still draws from `np.random`, which `drawn_transform` replaces."""
    generator = legacy_images().ImageDataGenerator(rotation_range=9, zoom_range=0.5)
    first, second = (
        drawn_transform(generator, (8, 8, 3), np.array(seeds, np.int32))
        for seeds in ([1, 2], [1, 3])
    )
    np.random.seed(0)
    state = np.random.get_state()[1].tolist()
    again = drawn_transform(generator, (8, 8, 3), np.array([1, 2], np.int32))
    assert first == again != second
    assert np.random.get_state()[1].tolist() == state, "Keras draws from something else."
