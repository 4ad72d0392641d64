"""Layers that change images at random: each image by draws of its own, and fast.

    seeds ──────────────> draws ─────────────> changed images, labels, boxes, masks
    random_numbers.py     `draw`               `change`

Every layer is an `AugmentationLayer` (`augmentation_layer.py`): it draws parameters from two
integers for each image, and changes images by parameters. In a pipeline the integers come with
the batch (`pipeline_batches.py`), in a model from the layer's own generator; the rest is the
same. `Sequence` puts layers in a row, and `adapters.py` lets those of Keras and keras-cv join.
"""

from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer as AugmentationLayer
from keras_multigpu.augmentation.sequence import Sequence as Sequence
