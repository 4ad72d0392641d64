"""Other processes: how they are started, watched and ended.

new_process     the command line and the environment of a new Python process
functions       functions that another process calls, and what comes back
groups          child processes that end together, on a signal or with this process
"""
