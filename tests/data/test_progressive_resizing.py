"""`image_size` by epoch: each epoch has the images of its size, in training and after a resume."""

import keras
import numpy as np
import pytest
from helpers.small_image_files import write_image, write_two_classes
from helpers.stopped_runs import StopAt, Stopped

import keras_multigpu as kmg
from keras_multigpu.callbacks import ResumableCheckpoint

SIZES = {0: 3, 2: (4, 6), 3: 8}
BY_EPOCH = [3, 3, (4, 6), 8, 8]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_two_classes(tmp_path_factory.mktemp("photos"))


def batches_of(photos, size, **settings):
    settings = {"resize": "random_crop", "global_batch_size": 7, "seed": 2, **settings}
    return kmg.data.from_directory(photos, image_size=size, verbose=False, **settings)


def require_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        for part, wanted in zip(one, other, strict=True):
            np.testing.assert_array_equal(part, wanted)


def test_each_epoch_has_the_batches_of_its_size(photos):
    """From any position, in shares, in parts, and on into later epochs."""
    batches = batches_of(photos, SIZES)
    fixed = [batches_of(photos, size) for size in BY_EPOCH]
    for epoch, one in enumerate(fixed):
        for arguments in ((), (9,), (0, (1, 2))):
            require_equal(batches.epoch(epoch, *arguments), one.epoch(epoch, *arguments))
        part, expected = (each.split(0.4)[1].take(5) for each in (batches, one))
        require_equal(part.epoch(epoch), expected.epoch(epoch))
    following = batches.epochs(1, 16)
    rest = [*fixed[1].epoch(1, 16), *fixed[2].epoch(2), *fixed[3].epochs(3).take(8)]
    require_equal(following.take(len(rest)), rest)
    require_equal(batches.evaluation().epoch(0), fixed[-1].evaluation().epoch(0))


def test_masks_have_the_size_of_their_images(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        write_image(path, 85 * number)
    masks = [tmp_path / "mask.png"] * 3
    keras.utils.save_img(masks[0], np.eye(4)[..., None], scale=False)
    made = kmg.data.from_files(paths, masks, task="mask", image_size={0: 2, 1: 8})
    shapes = [[part.shape[1:3] for part in next(iter(made.epoch(epoch)))] for epoch in (0, 1)]
    assert shapes == [[(2, 2)] * 2, [(8, 8)] * 2]
    assert next(iter(made.evaluation().epoch(0)))[1].shape == (3, 8, 8, 1)


def compiled(replicas):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((None, None, 3)), keras.layers.Rescaling(0.01), *layers])
    if replicas:
        model = kmg.distribute(model, kmg.strategy(devices=replicas))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


@pytest.mark.slow
def test_training_equals_one_device_and_resumes_exactly(photos, tmp_path):
    """The run stops within the third epoch, the only one of its size."""
    augment = kmg.augmentation.RandomGeometry(flip="horizontal", rotation=0.1)
    batches = batches_of(photos, SIZES, augment=augment)
    expected = compiled(0)
    for epoch, size in enumerate(BY_EPOCH):
        fixed = batches_of(photos, size, augment=augment).epoch(epoch)
        expected.fit(fixed, shuffle=False, verbose=0)

    def trained(*callbacks):
        model = compiled(2)
        checkpoint = ResumableCheckpoint(tmp_path / "run", every_steps=1)
        callbacks = [*callbacks, checkpoint]
        model.fit(batches, epochs=5, validation_data=batches, verbose=0, callbacks=callbacks)
        return model

    with pytest.raises(Stopped):
        trained(StopAt(2, 3, "on_train_batch_begin"))
    model = trained()
    for weight, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=2e-5, atol=2e-6)
