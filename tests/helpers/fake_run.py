"""A `fit` that traces no step: what callbacks see of one, in milliseconds.

Plain Keras takes each step in Python, on the whole batch; for probes, each replica's share is
computed once more. `tests/callbacks/test_fake_run.py` compares it with a real `fit`.
"""

import contextlib
from types import SimpleNamespace

import keras
import tensorflow as tf

from helpers.cpu_replicas import replicas_of
from keras_multigpu.batch_sizes import shares
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.run import AFTER, pythonic
from keras_multigpu.training.variables.adjusted_schedule import state_of
from keras_multigpu.training.watching.probe import NewValues, Probe
from keras_multigpu.training.watching.stopwatch import Times


class FakeRun:
    """Stands in for `TrainingRun`: arrays in order, and replicas that share their variables.

    Args:
        memory: How many examples fit on a replica; None for any number.
        moments: When each replica began its pass, had its gradients, and everyone's, in seconds.
    """

    is_eager, micro_batches, in_steps, step_began, data_wait = True, 1, 0.0, 0.0, 0.0

    def __init__(self, model, arrays, size, epochs, epoch, replicas, memory, moments):
        self.model, self.arrays, self.data = model, arrays, arrays[0]
        self.global_batch_size, self.epochs, self.epoch, self.step = size, epochs, epoch, 0
        self.replicas, self.group = replicas, ReplicaGroup(replicas_of(replicas))
        self.memory, self.moments = memory, moments or [(0.0, 0.0, 0.0)] * replicas
        self.logs, self.probes, self.state, self.next_size = {}, [], {"largest_share": None}, None
        self.acts = {moment: [] for moment in ("begin", *AFTER, "failure", "end")}
        source = SimpleNamespace(num_examples=len(self.data), spec=arrays)
        source.example_at = lambda epoch, step, place: f"example {place} of step {step}"
        self.feed = SimpleNamespace(source=source)
        # Creates all variables.
        model.test_step(next(self.first_batches()))
        model.optimizer.build(model.trainable_variables)

    @property
    def steps_per_epoch(self):
        return -(-len(self.data) // self.global_batch_size)

    def after_begin(self, act):
        self.acts["begin"].append(act)

    def after_each(self, hook, act):
        self.acts[hook].append(act)

    def after_failure(self, act):
        self.acts["failure"].append(act)

    def after_end(self, act):
        self.acts["end"].append(act)

    def act(self, moment):
        for act in self.acts[moment]:
            act()

    def watch(self, probe):
        probe.build(self.group.strategy)
        self.probes.append(probe)
        return probe

    def set_batch_size(self, global_batch_size, largest_share=None):
        self.next_size, self.state = global_batch_size, {"largest_share": largest_share}

    def first_batches(self, global_batch_size=None):
        size = global_batch_size or self.global_batch_size
        for start in range(0, len(self.data), size):
            yield rows_of(self.arrays, start, start + size)

    @contextlib.contextmanager
    def trial(self, batch):
        probes, self.probes, before = self.probes, [], self.values()
        yield
        self.probes = probes
        self.assign(before)

    def values(self):
        model = self.model
        known = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        return [(variable, variable.numpy()) for variable in known]

    def assign(self, values):
        for variable, value in values:
            variable.assign(value)

    def train_on(self, batch, micro_batches=None):
        """Take a step, and return the logs of the epoch so far."""
        if self.memory is not None and -(-len(batch[0]) // self.replicas) > self.memory:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")
        for probe in self.probes:
            probe.before_step()
        sees = any(type(probe).on_replica is not Probe.on_replica for probe in self.probes)
        before, views = self.values(), self.views(batch) if sees else []
        logs = self.model.train_step(batch)
        for view in views:
            weights = map(tf.convert_to_tensor, self.model.trainable_variables)
            slots = map(tf.convert_to_tensor, state_of(self.model.optimizer))
            view.update = NewValues(list(weights), list(slots))
        measured = [[probe.on_replica(view) for view in views] for probe in self.probes]
        pairs = list(zip(self.probes, measured, strict=True)) if sees else []
        answers = [answer for pair in pairs if (answer := pair[0].allows(pair[1])) is not None]
        allowed = tf.reduce_all(answers) if answers else None
        for probe, seen in pairs:
            probe.collect(seen, allowed)
        if allowed is not None and not allowed:
            self.assign(before)
            logs = self.model.get_metrics_result()
        return logs

    def views(self, batch):
        """What each replica has of a step whose loss is a mean; a `StepView` of each."""
        views, size = [], len(batch[0])
        for replica, (start, stop) in enumerate(shares(size, self.replicas)):
            x, y, weight = rows_of(batch, start, stop)
            variables = self.model.trainable_variables
            with tf.GradientTape() as tape:
                y_pred = self.model(x, training=True)
                loss = self.model.compute_loss(x, y, y_pred, weight, training=True)
            gradients = tape.gradient(loss, [variable.value for variable in variables])
            if start == stop:
                loss, gradients = tf.zeros(()), [tf.zeros_like(each) for each in gradients]
            view = SimpleNamespace(replica=replica, replicas=self.replicas, loss=loss)
            view.examples, view.global_batch_size = tf.constant([stop - start, size])
            view.batch, view.y_pred, view.variables = (x, y, weight), y_pred, variables
            view.gradients, view.statistics, view.loss_scale = gradients, [], tf.ones(())
            view.square_norm = sum((tf.reduce_sum(each**2) for each in gradients), tf.zeros(()))
            view.times = Times(*tf.constant(self.moments[replica], tf.float64))
            views.append(view)
        parts = [int(view.examples) / size for view in views]
        total = tf.add_n([part * view.loss for part, view in zip(parts, views, strict=True)])
        for view in views:
            view.total_loss, view.everyones_sums = total, [total, *view.gradients]
        return views


def rows_of(batch, start, stop):
    """Some rows of a batch, as tensors."""

    def cut(leaf):
        return None if leaf is None else tf.convert_to_tensor(leaf[start:stop])

    return keras.tree.map_structure(cut, tuple(batch))


def fake_fit(
    model,
    *callbacks,
    x,
    y,
    sample_weight=None,
    batch_size=4,
    epochs=2,
    initial_epoch=0,
    replicas=1,
    steps_per_execution=1,
    verbose=0,
    memory=None,
    moments=None,
):
    """What `fit` returns, of a model of plain Keras."""
    arrays, place = (x, y, sample_weight), (epochs, initial_epoch, replicas)
    run = FakeRun(model, arrays, batch_size, *place, memory, moments)
    steps = run.steps_per_epoch
    shown = {"add_progbar": verbose != 0, "verbose": verbose, "epochs": epochs, "steps": steps}
    hooks = keras.callbacks.CallbackList(list(callbacks), add_history=True, model=model, **shown)
    run.callbacks = hooks.callbacks
    vars(model)["training_run"], model.stop_training = run, False
    logs = {}
    try:
        hooks.on_train_begin()
        run.act("begin")
        for run.epoch in range(initial_epoch, epochs):
            model.reset_metrics()
            run.step, run.global_batch_size = 0, run.next_size or run.global_batch_size
            hooks.set_params({**hooks.params, "steps": run.steps_per_epoch})
            hooks.on_epoch_begin(run.epoch)
            run.act("on_epoch_begin")
            batches = list(run.first_batches())
            for first in range(0, len(batches), steps_per_execution):
                hooks.on_train_batch_begin(first)
                for batch in batches[first : first + steps_per_execution]:
                    run.logs = run.train_on(batch)
                run.step = min(first + steps_per_execution, len(batches))
                hooks.on_train_batch_end(run.step - 1, run.logs)
                run.act("on_train_batch_end")
            logs = pythonic(run.logs)
            hooks.on_epoch_end(run.epoch, logs)
            run.act("on_epoch_end")
            if model.stop_training:
                break
        hooks.on_train_end(logs)
    except Exception:
        run.act("failure")
        raise
    finally:
        del vars(model)["training_run"]
        run.act("end")
    return model.history
