"""How much a stale update counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from persafl_lit.errors import ConfigError

Discount = Literal["constant", "polynomial", "hinge"]


DISCOUNTS = ("constant", "polynomial", "hinge")


@dataclass(frozen=True)
class Discounted:
    """Stale updates count less: s(staleness) of Xie et al.

    constant: 1        polynomial: (staleness + 1)^-a        hinge: 1 up to b, then 1 / (a (staleness - b) + 1)
    """

    discount: Discount = "constant"
    """Weight of a stale update: `constant` 1, `polynomial` (s+1)^-a, `hinge` 1 up to b, then 1/(a(s-b)+1)."""
    discount_a: float = 0.5
    """a of `polynomial` and `hinge`."""
    discount_b: float = 4.0
    """b of `hinge`."""

    def __post_init__(self) -> None:
        if self.discount not in DISCOUNTS:
            raise ConfigError(f"method.discount must be one of {', '.join(DISCOUNTS)}; got {self.discount!r}")
        for name in ("discount_a", "discount_b"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"method.{name} must be >= 0; got {getattr(self, name)!r}")

    def weight(self, staleness: int) -> float:
        """s(staleness)."""
        if self.discount == "polynomial":
            return float((staleness + 1.0) ** -self.discount_a)
        if self.discount == "hinge" and staleness > self.discount_b:
            return 1.0 / (self.discount_a * (staleness - self.discount_b) + 1.0)
        return 1.0
