"""What is known of a program before it runs.

`facts.py` holds it, and `finding.py` finds it, operation by operation: `axes.py` says which axes of
an operation's inputs become which of its results, `lengths.py` how long the others are, `values.py`
what a small tensor of integers holds, `slices.py` what a slice takes, and `list_elements.py` what a
list of tensors holds. `families.py` lists operations that behave alike.
"""
