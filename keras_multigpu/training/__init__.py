"""Training on replicas: a Keras model whose batch is shared.

distribute              turns a Keras model into a `DistributedModel`
distributed_model       the class: Keras's methods
loops                   epochs and steps
run                     where `fit` stands, for callbacks
feeding                 batches: from datasets (`dataset_feeding`), from `Batches` (`epoch_feeding`)
replication             which step a model needs
step, updating_step     what steps have in common
one_step                the usual step
whole_batch             the step for losses that are no sums over examples
custom_step             the step around a `train_step` of the user's own
probes                  what callbacks measure and forbid inside a step
model_state             all values that training changes, taken and given back
passes, pure_model      forward and backward on a replica, as pure functions
loss_reduction          per-example losses to one number
optimizer_update        gradients to new values
moving_statistics, randomness, sync_batch_norm, stages, placement, packing, shares, tracing
"""
