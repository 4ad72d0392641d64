"""Tests in which something takes its time, on a machine that may take its time as well."""

import functools
import inspect

NAPS = (0.1, 0.5, 2.5)


def with_naps(test):
    """A test that is given naps so long that what else the machine does is little beside them.

    What holds for short ones on an idle machine holds for longer ones on a busy one; what is wrong
    fails with all of them.
    """

    @functools.wraps(test)
    def patient(*arguments, **more):
        for nap in NAPS[:-1]:
            try:
                return test(*arguments, nap=nap, **more)
            except AssertionError:
                pass
        return test(*arguments, nap=NAPS[-1], **more)

    signature = inspect.signature(test)
    others = [one for one in signature.parameters.values() if one.name != "nap"]
    patient.__signature__ = signature.replace(parameters=others)
    return patient
