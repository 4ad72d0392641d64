"""`keras-multigpu scoreboard`: what somebody's GPUs show, as a table to send in.

board       the parts, each in a process with limits, and the table
part        a process that runs the checks of a part
machine     devices, a strategy over them, rows of the table; the facts
exactness   the spread of one device, and small trainings on all against one
networks    the networks whose speed is measured, on one device, in stock Keras and here
speed       steps, scaling and peak memory
overlap     how much of the sums is hidden behind computing
"""
