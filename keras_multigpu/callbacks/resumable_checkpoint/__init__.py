"""`ResumableCheckpoint`: kill it anywhere, run it again.

resumable_checkpoint ───> states ─────────────> folder ───> format
what is saved             of the callbacks      the files   the bytes
resumed_run   whether and where a run resumes   ending      signals, and several workers
"""
