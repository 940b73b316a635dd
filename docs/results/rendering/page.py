"""Markdown whose numbers are computed, and how a mean or a difference over seeds is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from persafl_lit.report.aggregate import spread

COUNTS = {1: "one seed", 2: "two seeds", 3: "three seeds"}


def verdict(first: pd.Series, second: pd.Series) -> str:
    """What the paired 95 % interval of first - second says (Student's t); of one seed, which is ahead."""
    gaps = (first - second).dropna()
    if len(gaps) == 1:
        return "ahead on one seed" if gaps.iloc[0] > 0 else "behind on one seed"
    low, high = spread(gaps).interval
    return "better" if low > 0 else "worse" if high < 0 else "undecided"


@dataclass
class Page:
    """Markdown whose numbers are computed; `numbers` remembers each as it was written."""

    lines: list[str] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)

    def add(self, *paragraphs: str) -> None:
        for paragraph in paragraphs:
            self.lines += [paragraph, ""]

    def number(self, value: float, form: str = ".3f") -> str:
        text = format(value, form)
        self.numbers.add(text.lstrip("+-"))
        return text

    def mean(self, values: pd.Series) -> str:
        """Mean of an accuracy over seeds with its interval."""
        return self._spread(values, ".3f", 0, 1)

    def difference(self, first: pd.Series, second: pd.Series) -> str:
        """Mean of first - second over the seeds that both have, its paired interval, and what that says."""
        gaps = (first - second).dropna()
        said = self._spread(gaps, "+.3f", -1, 1)
        return said if len(gaps) < 2 else f"{said}, {verdict(first, second)}"

    def _spread(self, values: pd.Series, form: str, lowest: float, highest: float) -> str:
        """Mean and 95 % interval. Of two seeds, and where the interval leaves what is possible (so that Student's t
        does not describe these values), the values themselves."""
        if not values.index.is_unique:
            raise ValueError("a seed is counted twice")
        mean = self.number(values.mean(), form)
        if len(values) < 2:
            return f"{mean} (one seed)"
        low, high = spread(values).interval
        if len(values) > 2 and lowest <= low and high <= highest:
            return f"{mean} [{self.number(low, form)}, {self.number(high, form)}]"
        if len(values) in COUNTS:
            return f"{mean} ({COUNTS[len(values)]}: {', '.join(self.number(value, form) for value in sorted(values))})"
        count, ends = self.number(len(values), "d"), (self.number(end, form) for end in (values.min(), values.max()))
        return f"{mean} ({count} seeds: {' to '.join(ends)})"

    def setting(self, values: Mapping[str, str | float]) -> str:
        """`delays = pareto, delays.shape = 2.5`."""
        return ", ".join(f"{key.removesuffix('.name')} = {self._value(value)}" for key, value in values.items())

    def _value(self, value: str | float) -> str:
        try:
            return self.number(float(value), "g")
        except ValueError:
            return str(value)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        self.lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]

    def text(self) -> str:
        return "\n".join(self.lines).rstrip() + "\n"
