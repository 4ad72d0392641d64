"""`ResumableCheckpoint`: kill it anywhere, run it again.

callback ───> states ───> writer ───> folder ───> format
what to     in the      which       bytes
keep        background  files
resumed_run   where a run goes on         signals   SIGTERM         together   several workers
"""
