"""A package, so that its modules may be called as those in the folder above."""
