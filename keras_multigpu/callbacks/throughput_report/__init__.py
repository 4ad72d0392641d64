"""`ThroughputReport`: examples a second, and what limits them.

callback ───> report ───> bottlenecks, scaling_run ───> figure
forward_flops, device_peaks   how busy the devices could be
"""
