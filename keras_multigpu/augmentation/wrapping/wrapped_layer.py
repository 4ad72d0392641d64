"""`WrappedLayer`, which the wrappers of other packages' layers and of functions extend."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.augmentation.arguments import require_bool
from keras_multigpu.augmentation.augmentation_layer import AugmentationLayer
from keras_multigpu.augmentation.examples import Drawn, Shape
from keras_multigpu.checks import value_error
from keras_multigpu.seeded_layers import require_instance

# What has to follow where pixels move.
MOVED = ("bounding_boxes", "segmentation_masks")


class WrappedLayer(AugmentationLayer):
    """A layer or function of another package as an `AugmentationLayer`."""

    settings = ("moves_pixels",)

    # The name of the constructor's argument for what is wrapped.
    argument = "layer"

    def __init__(self, wrapped: Any, moves_pixels: bool | None, **kwargs: Any) -> None:
        require_instance(wrapped)
        self.require_wrappable(wrapped)
        if moves_pixels is not None:
            require_bool("moves_pixels", moves_pixels)
        # Whether boxes can follow is checked below, once the wrapped layer is known.
        box_format = kwargs.pop("bounding_box_format", None)
        super().__init__(**kwargs)
        self.wrapped = wrapped
        self.moves_pixels = moves_pixels
        self.bounding_box_format = box_format
        self._known_to_follow: list[str] = []
        if box_format is not None:
            self.require_support("bounding_boxes")

    @property
    def title(self) -> str:
        return type(self.wrapped).__name__

    def get_config(self) -> dict[str, Any]:
        wrapped = keras.saving.serialize_keras_object(self.wrapped)
        return {**super().get_config(), self.argument: wrapped}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WrappedLayer":
        wrapped = keras.saving.deserialize_keras_object(config[cls.argument])
        return cls(**{**config, cls.argument: wrapped})

    def draw(self, seeds: tf.Tensor, shape: Shape) -> Drawn:
        return {"seeds": seeds}

    def require_wrappable(self, wrapped: Any) -> None:
        """Raise a `ValueError` if this class cannot wrap it."""
        raise NotImplementedError

    def obstacle(self, kind: str) -> str | Exception | None:
        """Why boxes or masks cannot follow the images; None if they can."""
        raise NotImplementedError

    def require_support(self, *kinds: str) -> None:
        for kind in MOVED:
            if kind not in kinds or kind in self._known_to_follow:
                continue
            reason = self.obstacle(kind)
            if reason is None:
                # Not again, because finding out may trace the layer, which is slow.
                self._known_to_follow.append(kind)
                continue
            error = reason if isinstance(reason, Exception) else None
            text = reason if error is None else f"it raised {type(error).__name__} on a trial"
            raise value_error(
                f"{self.title} cannot change `{kind}` along with the images: {text}.",
                "Expected only layers that can, or examples without them.",
                "Use a layer of `keras_multigpu.augmentation`, or pass "
                f"`augmentation.{type(self).__name__}(..., moves_pixels=False)` if every "
                "pixel stays where it is.",
                layer=self.name,
            ) from error
