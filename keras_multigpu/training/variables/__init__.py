"""Where a model's variables live, and what happens to them.

placement           built, and onto the replicas, values kept; those of metrics once
adjusted_schedule   what a step reads of optimizers, schedules that callbacks adjust included
model_state         all values, taken and given back, and what the model was made of
"""
