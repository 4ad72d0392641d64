"""Where a model's variables live, and what happens to them.

placement            onto the replicas, values kept
metric_storages      metrics: once, or in parts on the replicas
caught_assignments, untracked    what a user's code assigns in a step
model_state          all values, taken and given back
model_identity       what the model was made of
"""
