"""Where a model's variables live, and what happens to them.

placement        built, and onto the replicas, values kept; those of metrics once, or in parts
catching_scope   what a user's code does with them in a step
model_state      all values, taken and given back, and what the model was made of
"""
