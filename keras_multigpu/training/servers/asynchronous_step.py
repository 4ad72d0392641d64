"""A training step that a worker takes as a whole, while others take theirs."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import variable_internals
from keras_multigpu.training.exchange.stages import summing
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.servers.parameter_servers import Servers
from keras_multigpu.training.servers.served_step import bound_to_this_process
from keras_multigpu.training.shares import Batch, Rows, present
from keras_multigpu.training.steps.setting import Setting
from keras_multigpu.training.steps.split_step import SplitStep, after, known_variables
from keras_multigpu.training.variables.placement import optimizers_of


class AsynchronousTrainStep(SplitStep):
    """A step of training that adds what it changes to what the servers hold by then.

    An assignment would undo the updates of others.

    Args:
        model: The model, whose variables are on the host.
        setting: Its only replica.
        spec: The specs of a global batch.
        function: The model's step.
        servers: The workers, and the servers that hold the values.
    """

    def __init__(
        self,
        model: keras.Model,
        setting: Setting,
        spec: Batch,
        function: Callable[[Any], Any],
        servers: Servers,
    ) -> None:
        super().__init__(model, setting, spec, function, setting.pieces)
        what = bound_to_this_process(self._whole, self._copies)
        if what := what or (self._unsplit and f"what cannot be handed on ({self.alone})"):
            raise servers.refusal(f"a step that needs {what}", "Leave `asynchronous` out")
        self._servers = servers
        self._stored = servers.copies([copies[0] for copies in self._copies])
        places = {id(copies[0]): place for place, copies in enumerate(self._copies)}

        def places_of(variables: Sequence[keras.Variable]) -> set[int]:
            return {places[i] for v in variables if (i := id(copies_of(v)[0])) in places}

        known = known_variables(model)
        self._seeds = places_of([v for v in known if variable_internals.is_seed_state(v)])
        # Two workers that halve it would let nothing of it.
        self._scales = places_of(
            [
                variable
                for optimizer in optimizers_of(model)
                if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
                for variable in (optimizer.dynamic_scale, optimizer.step_counter)
            ]
        )
        numbers = [tf.TensorSpec((), tf.int32), tf.TensorSpec((len(self._batches),), tf.int32)]
        self._function = tf.function(
            self._on_worker, autograph=False, input_signature=[*numbers, *self._specs]
        )

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Train on one batch; the results are those of a batch that is done by now."""
        self._servers.push()
        (rows,) = shares
        data = tf.nest.flatten(present(rows.data), expand_composites=True)
        number, sizes = tf.constant(self._servers.steps), self._counts(rows)[:, 1]
        return self._servers.schedule(self._function, (number, sizes, *data), self._filled)

    def _on_worker(self, step: tf.Tensor, sizes: tf.Tensor, *data: tf.Tensor) -> list[Any]:
        """The step's results, after it has changed what the servers hold."""
        values = [copy.read_value() for copy in self._stored]
        for place in self._seeds:
            # Steps that run at the same time begin with the same state, and each draws anew.
            seed, count = tf.unstack(values[place])
            values[place] = tf.stack([seed + tf.cast(step, seed.dtype), count])
        (replica,) = self._group.replicas
        size = sizes[0]
        pieces = self._taken_in_pieces(replica, sizes, tf.zeros_like(sizes), data)
        given = sizes, size, self._lengths(data)
        with summing(list):
            arguments = [(*numbers, *given, taken, values) for *numbers, taken in pieces]
            result = self._on_replica(
                arguments, values, Rows((None, None, None), size, size), replica
            )
        with after([result]):
            for place, new in zip(self._assigned, result.pieces[0][1], strict=True):
                copy = self._stored[place]
                adds_up = copy.dtype.is_floating or copy.dtype.is_integer
                if adds_up and place not in self._scales:
                    copy.assign_add(new - values[place])
                else:
                    copy.assign(new)
        return self._joined([[each[0] for each in result.pieces]])
