"""`Size`: the length of an axis that may be known only when a step runs.

A step is traced once for batches of any size. So a length is a polynomial of the numbers that
change from batch to batch: `Size.of("batch")`, `2 * Size.of("batch") + 1`. A constant is an `int`.
"""

import collections
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Monomial = tuple[str, ...]


@dataclass(frozen=True)
class Size:
    """A polynomial of named numbers, with whole coefficients.

    Args:
        terms: The names in each term and its coefficient, which is not 0; all sorted.
    """

    terms: tuple[tuple[Monomial, int], ...]

    @classmethod
    def of(cls, name: str) -> "Size":
        return cls((((name,), 1),))

    @property
    def names(self) -> set[str]:
        """The names in it."""
        return {name for monomial, _ in self.terms for name in monomial}

    def __add__(self, other: "AnySize") -> "AnySize":
        total = dict(self.terms)
        for monomial, coefficient in terms_of(other):
            total[monomial] = total.get(monomial, 0) + coefficient
        return simplest(total)

    def __mul__(self, other: "AnySize") -> "AnySize":
        total: dict[Monomial, int] = {}
        for one, coefficient in self.terms:
            for two, factor in terms_of(other):
                monomial = tuple(sorted(one + two))
                total[monomial] = total.get(monomial, 0) + coefficient * factor
        return simplest(total)

    def __neg__(self) -> "AnySize":
        return self * -1

    def __sub__(self, other: "AnySize") -> "AnySize":
        return self + (-1 * other)

    def __rsub__(self, other: int) -> "AnySize":
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __repr__(self) -> str:
        return " + ".join(
            "*".join([*([str(coefficient)] if coefficient != 1 or not names else []), *names])
            for names, coefficient in self.terms
        )


AnySize = int | Size


def is_number(entry: AnySize | None) -> bool:
    """Whether an entry of a shape is known, and is the same for batches of every size."""
    return entry is not None and not isinstance(entry, Size)


def terms_of(size: AnySize) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(size, Size):
        return size.terms
    return (((), int(size)),) if size else ()


def simplest(terms: Mapping[Monomial, int]) -> AnySize:
    kept = {monomial: coefficient for monomial, coefficient in terms.items() if coefficient}
    if kept.keys() <= {()}:
        return kept.get((), 0)
    return Size(tuple(sorted(kept.items())))


def product(sizes: Sequence[AnySize]) -> AnySize:
    one: AnySize = 1
    return functools.reduce(operator.mul, sizes, one)


def elements(dims: Sequence[AnySize | None]) -> int:
    """Roughly how many elements a tensor has; unknown sizes count as 32."""
    guess: dict[str, int] = collections.defaultdict(lambda: 32)
    return max(1, value_of(product([32 if dim is None else dim for dim in dims]), guess))


def quotient(size: AnySize, divisor: AnySize) -> AnySize | None:
    """A size divided by one with a single term; None if that leaves a remainder."""
    if size == divisor:
        return 1
    if len(terms_of(divisor)) != 1:
        return None
    ((names, factor),) = terms_of(divisor)
    found: dict[Monomial, int] = {}
    for monomial, coefficient in terms_of(size):
        left = list(monomial)
        for name in names:
            if name not in left:
                return None
            left.remove(name)
        if coefficient % factor:
            return None
        found[tuple(left)] = coefficient // factor
    return simplest(found)


def value_of(size: AnySize, numbers: Mapping[str, int]) -> int:
    """A size for these values of the names in it."""
    return sum(
        coefficient * math.prod(numbers[name] for name in monomial)
        for monomial, coefficient in terms_of(size)
    )
