"""`UsageError`: what a command raises when it was called wrongly or lacks something."""


class UsageError(Exception):
    """A command cannot do its work; its message is printed without a traceback."""
