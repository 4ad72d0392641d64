"""`UsageError`: what a command raises when it was called wrongly or lacks something."""

import importlib.util

from keras_multigpu.checks import problem


class UsageError(Exception):
    """A command cannot do its work; its message is printed without a traceback."""


def require_package(module: str, package: str) -> None:
    """Raise a `UsageError` where an optional package is missing.

    Args:
        module: What is imported.
        package: What pip calls it.
    """
    if importlib.util.find_spec(module) is None:
        raise UsageError(
            problem(
                f"The package {package} is not installed.",
                "Expected it for this command; the rest of keras_multigpu does without.",
                f"Run `pip install {package}`.",
                package=package,
            )
        )
