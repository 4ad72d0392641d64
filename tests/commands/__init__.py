"""A package, so that its modules may have the names of modules in the folder above."""
