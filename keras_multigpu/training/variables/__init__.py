"""Where a model's variables live, and what happens to them.

placement            onto the replicas, values kept; those of metrics once, or in parts
caught_assignments   what a user's code assigns in a step
own_gradients        what a user's code takes the gradient of in a step
model_state          all values, taken and given back, and what the model was made of
"""
