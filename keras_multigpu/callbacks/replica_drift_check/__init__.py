"""`ReplicaDriftCheck`: are the replicas still equal?"""
