"""What a study of one option is: its settings, what was found, and checks, statements that are computed from the
numbers and either hold or do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from persafl_lit.errors import ConfigError
from persafl_lit.theory.bounds import METHODS, THEOREMS, Option
from persafl_lit.theory.fit import Estimate

Tick = Callable[[str, int], object]
"""Told what is being simulated and how many server updates it has just done."""

PROBLEMS = ("quadratic", "logistic")


@dataclass(frozen=True)
class Settings:
    """What a user may choose."""

    tau: int = 10
    clients: int = 10
    seeds: int = 20
    Q: int = 2
    dimension: int = 3
    problem: str = "quadratic"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("tau", 0, 100),
            ("clients", 1, 1000),
            ("seeds", 2, 1000),
            ("Q", 1, 100),
            ("dimension", 1, 100),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(
                    f"--{'local-steps' if name == 'Q' else name} must lie between {least} and {most}; got {value}"
                )
        if self.problem not in PROBLEMS:
            raise ConfigError(f"--problem must be one of {', '.join(PROBLEMS)}; got {self.problem!r}")

    def taus(self) -> list[int]:
        """0, about a quarter, a half and all of tau."""
        return sorted({0, max(1, round(self.tau / 4)), max(1, round(self.tau / 2)), self.tau} if self.tau else {0})


@dataclass(frozen=True)
class Check:
    """A statement, whether it holds, and the numbers that say so."""

    option: str
    name: str
    passed: bool
    detail: str


@dataclass
class Study:
    """All that was found about one option."""

    option: Option
    constants: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    slopes: dict[str, Estimate] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    staleness: dict[str, Any] = field(default_factory=dict)
    floor: dict[str, Any] = field(default_factory=dict)
    limit: dict[str, Any] = field(default_factory=dict)
    uneven: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, passed: bool, detail: str) -> None:
        self.checks.append(Check(self.option, name, bool(passed), detail))

    def summary(self) -> dict[str, Any]:
        return {
            "option": self.option,
            "theorem": THEOREMS[self.option],
            "method": METHODS[self.option],
            "constants": self.constants,
            "slopes": {name: estimate._asdict() for name, estimate in self.slopes.items()},
            "staleness": self.staleness,
            "floor": self.floor,
            "limit": self.limit,
            "uneven": self.uneven,
        }
