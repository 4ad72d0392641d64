"""Which step a model needs, and the steps.

steps_of_model     chooses, for the model as it is compiled; compiles for the batches that come
step               what steps have in common, and the usual one: losses that are sums over examples
evaluation_step    the pass and the step of `evaluate` and `predict`
whole_batch_step   losses that need the whole batch
custom_step        around a `train_step` of the user's own (`present_step`, `whole_values`)
same_batch         whether all processes have read the same batch
probes             what callbacks measure and forbid inside a step
"""
