"""`ResumableCheckpoint`: kill it anywhere, run it again.

callback ───> states ───> folder ───> format
what to     which       bytes
keep        files
resumed_run   where a run goes on         signals   SIGTERM         together   several workers
"""
