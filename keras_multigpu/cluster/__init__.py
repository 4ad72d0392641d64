"""Several worker processes: who they are, and what starts them.

environment     Cluster: the workers and which of them this process is, from TF_CONFIG
"""
