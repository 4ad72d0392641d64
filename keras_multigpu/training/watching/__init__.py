"""What callbacks see, measure and forbid inside a step.

probe      what a callback adds to a step, and what it sees there
recorded   the loss, predictions and gradients of a step, and what a replica has of them
watched    the probes of one step, and what follows from their answers
standstill where training stands still
progress   counts the sums that replicas have come to in a step
whereabouts names these sums and their layers
stopwatch  when a replica began, had its summands, and had the sums
"""
