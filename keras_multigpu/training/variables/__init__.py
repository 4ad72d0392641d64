"""Where a model's variables live, and how they are saved and restored.

placement           builds the model, and moves its variables to the replicas
storage             variables in parts, as `shard=` asks
open_sums           variables that hold sums which wait for an update
adjusted_schedule   learning rate schedules that callbacks can adjust
model_state         all values, saved and restored, and what the model was made of
"""
