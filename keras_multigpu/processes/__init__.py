"""Other processes: how they are started, watched and ended.

new_process     the command and the environment of a new Python
functions       functions and results that travel to another process and back
in_a_process    what the process of a function runs
groups          processes that end together, with all that they have started
interrupts      notes a Ctrl-C, so that children are ended first
watchdog        ends them if this process dies without doing so
"""
