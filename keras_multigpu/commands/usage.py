"""What a command raises when it was called wrongly or lacks something."""

import functools

from keras_multigpu.checks import error_of


class UsageError(Exception):
    """A command cannot do its work; its message is printed without a traceback."""


usage_error = functools.partial(error_of, UsageError)
