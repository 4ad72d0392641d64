"""`ReplicaDriftCheck`: are the replicas still equal?

callback ───> checksums ───> drift
"""
