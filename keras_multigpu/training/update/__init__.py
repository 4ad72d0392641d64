"""From summed gradients to new values, on each replica alike.

optimizer_update    one optimizer step as a pure function
adjusted_schedule   a schedule that callbacks scale or replace

The arithmetic is Keras's own; `keras_internals/optimizer_internals` runs it without assigning, also
accumulated gradients, averages of weights (EMA) and rows of embeddings.
"""
