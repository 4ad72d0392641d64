"""Whether the velocity of SGD follows the learning rate.

Keras keeps the rate inside the velocity: `v = momentum * v - rate * gradient`. Where the rate
changes, the old gradients in `v` would go on with the old rate (Goyal et al. 2017, section 3.3).
"""

import keras

from keras_multigpu.callbacks.rates.rates import Rate
from keras_multigpu.checks import value_error


def corrects_momentum(choice: bool | str, rate: Rate) -> bool:
    """Whether to correct; a `ValueError` where it is wanted and there is nothing to correct."""
    optimizer = rate.optimizer
    has_velocity = isinstance(optimizer, keras.optimizers.SGD) and bool(optimizer.momentum)
    if choice is True and not has_velocity:
        raise value_error(
            "`momentum_correction=True` came to an optimizer whose state is free of the rate.",
            "Expected `keras.optimizers.SGD` with momentum.",
            'Leave it out, which means "auto".',
            optimizer=type(optimizer).__name__,
        )
    return has_velocity and choice is not False
