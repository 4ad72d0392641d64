"""`ResumableCheckpoint`: kill it anywhere, run it again.

resumable_checkpoint ───> states ─────────────> folder ───> local_files, bucket ───> format
what is saved             of the callbacks      which one   where it is              the bytes
resumed_run   whether and where a run resumes   ending      signals, and several workers
"""
