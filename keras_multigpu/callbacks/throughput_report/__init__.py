"""`ThroughputReport`: examples a second, and what limits them.

callback ───> report ───> bottlenecks, scaling_run
forward_flops                 how many operations a step takes
"""
