"""How rules are registered: open sums and lists are handled before rows."""

import functools
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Items, Layout
from keras_multigpu.partition.plan import RULES, Facts, Plan, Rule, rows_of
from keras_multigpu.partition.rules.sums import open_sum

Own = TypeVar("Own", bound=Rule)


def rows_rule(*types: str) -> Callable[[Own], Own]:
    """Enter a function as the rule for these operations, where an input lies in rows.

    Where the operation may pass a sum on that is still to come, it does; else the sum is taken
    before the function is asked.
    """

    def enter(function: Own) -> Own:
        @functools.wraps(function)
        def rule(op: tf.Operation, ins: tuple[Layout, ...], facts: Facts) -> Plan | None:
            if any(isinstance(layout, Items) for layout in ins):
                return None
            if PARTIAL in ins:
                found = open_sum(op, ins)
                if found is not None:
                    return found
                ins = tuple(REPLICATED if layout == PARTIAL else layout for layout in ins)
            return function(op, ins, facts) if rows_of(ins) else None

        RULES.update(dict.fromkeys(types, rule))
        return function

    return enter
