"""When steps begin and end.

step_probe ───> step_clock
"""
