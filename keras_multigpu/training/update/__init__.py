"""From summed gradients to new values, on each replica alike.

optimizer_update    one optimizer step as a pure function
adjusted_schedule   a schedule that callbacks scale or replace
"""
