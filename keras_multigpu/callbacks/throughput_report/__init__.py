"""`ThroughputReport`: examples a second, and what limits them.

callback ───> report ───> bottlenecks, scaling_run ───> figure
forward_flops                 how many operations a step takes
"""
