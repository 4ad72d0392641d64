"""Decorators that enter functions as rules."""

import functools
from collections.abc import Callable
from typing import TypeVar

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Items, Layout
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.rules.plan import RULES, Plan, Rule, rows_of
from keras_multigpu.partition.rules.sums import open_sum

Own = TypeVar("Own", bound=Rule)


def rule(*types: str) -> Callable[[Own], Own]:
    """Enter a function as the rule for these types of operations."""

    def enter(function: Own) -> Own:
        RULES.update(dict.fromkeys(types, function))
        return function

    return enter


def rows_rule(*types: str) -> Callable[[Own], Own]:
    """Enter a function that is called only where an input is in rows, and none is an open sum.

    An operation that can pass an open sum on does so. For any other the sum is taken first.
    """

    def enter(function: Own) -> Own:
        @rule(*types)
        @functools.wraps(function)
        def with_sums(op: Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
            if any(isinstance(layout, Items) for layout in ins):
                return None
            if PARTIAL in ins:
                found = open_sum(op, ins)
                if found is not None:
                    return found
                ins = tuple(REPLICATED if layout == PARTIAL else layout for layout in ins)
            return function(op, ins, facts) if rows_of(ins) else None

        return function

    return enter
