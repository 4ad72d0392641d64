"""`ThroughputReport`: examples per second, and what limits them."""
