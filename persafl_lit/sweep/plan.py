"""A sweep file, checked: what is varied, on which seeds, and what is selected on.

name: lambda
overrides: [data=digits, horizon=40]
grid:                                       # a list of blocks; each is a cartesian product
  - {method: persafl_me, method.lam: [20, 25, 30], schedule.tau: [10, 30]}
seeds: [0, 1, 2]
select: {metric: accuracy.val, stages: two} # the grid on the first seed, then each method's best on all
search: {how: random, trials: 20}           # values by chance instead of all; then {low: 1, high: 50, log: true} may
stand for a list
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from persafl_lit.common.fields import NOT_A_KEY
from persafl_lit.config.coerce import coerce, construct
from persafl_lit.config.compose import compose, flat_overrides
from persafl_lit.config.schema import Tracking
from persafl_lit.errors import ConfigError, closest
from persafl_lit.report.record import model_changed
from persafl_lit.sweep.yaml_lines import Source

KEYS = ("name", "overrides", "grid", "seeds", "select", "search")
SELECTION_METRICS = {"accuracy.val": 1, "loss.val": -1}
"""What settings may be chosen by, and whether more is better. Test scores are only ever reported."""
MOST_TRIALS = 100_000


@dataclass(frozen=True)
class Select:
    metric: str = "accuracy.val"
    stages: str = "one"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z]\w*\.val", self.metric, re.ASCII):
            raise ConfigError(
                f"select.metric must be {' or '.join(SELECTION_METRICS)} or NAME.val (nothing is chosen on test data); "
                f"got {self.metric!r}"
            )
        if self.stages not in ("one", "two"):
            raise ConfigError(f"select.stages must be one or two; got {self.stages!r}")

    direction: int = field(default=0, metadata=NOT_A_KEY)
    """Of a metric beside accuracy and loss: +1 if higher is better, -1 if lower."""

    @property
    def kind(self) -> str:
        """accuracy, loss or another metric, whatever the split."""
        return self.metric.partition(".")[0]

    @property
    def sign(self) -> int:
        return SELECTION_METRICS.get(self.metric, self.direction)

    def score(self, summary: Mapping[str, Any]) -> float:
        """Higher is better; nan where a run does not have the metric, or trained nothing."""
        group, _, name = self.metric.partition(".")
        found = summary[group] if self.metric in SELECTION_METRICS else (summary.get("metrics") or {}).get(group) or {}
        value = found.get(name)
        return math.nan if value is None or not model_changed(summary) else self.sign * float(value)


@dataclass(frozen=True)
class Search:
    how: str
    trials: int
    """Settings per block."""
    seed: int = 0
    prune: bool = True
    """Adaptive: stop trials at an evaluation where they are worse than the median of the others."""

    def __post_init__(self) -> None:
        if self.how not in ("random", "adaptive"):
            raise ConfigError(f"search.how must be random or adaptive; got {self.how!r}")
        if not 1 <= self.trials <= MOST_TRIALS:
            raise ConfigError(f"search.trials must be from 1 to {MOST_TRIALS}; got {self.trials}")


@dataclass(frozen=True)
class Range:
    """Values between two bounds, for a search."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"a range needs finite low < high; got {self.low!r} and {self.high!r}")
        if self.log and self.low <= 0:
            raise ConfigError(f"a range with log: true needs low > 0; got {self.low!r}")


Choice = Sequence[Any] | Range


@dataclass(frozen=True)
class Block:
    """One entry of `grid`: keys with one value, and keys that vary."""

    number: int
    line: int
    fixed: Mapping[str, Any]
    varied: Mapping[str, Choice]


@dataclass(frozen=True)
class Plan:
    name: str
    overrides: Mapping[str, Any]
    blocks: tuple[Block, ...]
    seeds: tuple[int, ...]
    select: Select
    search: Search | None
    source: Source

    @property
    def two_stages(self) -> bool:
        """An adaptive search always has two stages: it proposes settings on the first seed only."""
        return self.select.stages == "two" or (self.search is not None and self.search.how == "adaptive")

    @property
    def tracking(self) -> Tracking:
        """Where the sweep is recorded."""
        asked = {key: value for key, value in self.overrides.items() if key.startswith("tracking.")}
        return compose({"tracking.experiment": self.name, **asked}).tracking

    def place(self, block: Block, key: str | None = None) -> str:
        """File and line of a block, or of a key of it."""
        path = ("grid", block.number) if key is None else ("grid", block.number, key)
        return f"{self.source.name}:{self.source.line(path)}"


def read_plan(path: Path, overrides: Iterable[str] = ()) -> Plan:
    """A sweep file, with what the command line says about it: overrides of all trials, and `name=` and `seeds=`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the sweep file {path}: {getattr(error, 'strerror', None) or error}") from None
    return plan_of(Source(path.name, text), path.stem, overrides)


def plan_of(source: Source, default_name: str, overrides: Iterable[str] = ()) -> Plan:
    values = source.values
    for key in values:
        if key not in KEYS:
            raise source.refuse((key,), f"unknown key {key!r}; a sweep file has {', '.join(KEYS)}.{closest(key, KEYS)}")
    asked = flat_overrides(list(overrides))
    name = coerce(str, asked.pop("name"), "name") if "name" in asked else str(values.get("name") or default_name)
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]{0,99}", name, re.ASCII):
        raise source.refuse(("name",), f"name is a word of letters, digits, '_', '-' and '.'; got {name[:100]!r}")
    seeds = _seeds(source, coerce(Any, asked.pop("seeds", values.get("seeds", [0])), "seeds"))
    common = _common(source) | asked
    search = _section(source, "search", Search)
    blocks = _blocks(source, search is not None)
    select = _directed(source, _section(source, "select", Select) or Select(), common)
    plan = Plan(name, common, blocks, seeds, select, search, source)
    for block in blocks:
        for key in (*block.fixed, *block.varied):
            if key == "seed":
                raise source.refuse(
                    ("grid", block.number, key), "seed does not belong into the grid; list seeds under seeds"
                )
            if key in asked:
                raise ConfigError(
                    f"{key} is set by the grid ({plan.place(block, key)}) and on the command line; drop one"
                )
    return plan


def _directed(source: Source, select: Select, common: Mapping[str, Any]) -> Select:
    """A metric that selects must say which values are better, before anything runs."""
    if select.metric in SELECTION_METRICS:
        return select
    name = select.metric.removesuffix(".val")
    config = compose(
        {
            key: value
            for key, value in common.items()
            if key.startswith(("eval.metrics", "eval.direction", "allow_code"))
        }
    )
    sign = config.metric_sign(name)
    if not sign:
        why = (
            f"overrides must list {name} under eval.metrics or, if the model logs it, say "
            f"eval.direction.{name}=higher or lower"
        )
        raise source.refuse(
            ("select",), f"select.metric={select.metric}: it is not known which values are better; {why}"
        )
    return replace(select, direction=sign)


def _common(source: Source) -> dict[str, Any]:
    listed = source.values.get("overrides") or []
    if not isinstance(listed, (list, dict)) or (
        isinstance(listed, list) and not all(isinstance(item, str) for item in listed)
    ):
        raise source.refuse(("overrides",), "overrides is a list such as [data=digits, horizon=40]")
    try:
        common = flat_overrides(listed)
    except ConfigError as error:
        raise source.refuse(("overrides",), str(error)) from None
    if "seed" in common:
        raise source.refuse(("overrides",), "seed does not belong into overrides; list seeds under seeds")
    return common


def _seeds(source: Source, seeds: Any) -> tuple[int, ...]:
    listed = seeds if isinstance(seeds, list) else [seeds]
    if not listed or not all(type(seed) is int and 0 <= seed < 2**63 for seed in listed):
        raise source.refuse(("seeds",), f"seeds is a list of whole numbers >= 0; got {seeds!r}")
    if len(set(listed)) < len(listed):
        raise source.refuse(("seeds",), f"a seed is there twice: {seeds}")
    return tuple(listed)


def _section(source: Source, key: str, cls: type) -> Any:
    values = source.values.get(key)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise source.refuse(
            (key,),
            (
                f"{key} is a mapping such as "
                f"{'{metric: accuracy.val}' if key == 'select' else '{how: random, trials: 20}'}"
            ),
        )
    try:
        return construct(cls, values, key)
    except ConfigError as error:
        raise source.refuse((key,), str(error)) from None


def _blocks(source: Source, searching: bool) -> tuple[Block, ...]:
    grid = source.values.get("grid")
    blocks = [grid] if isinstance(grid, dict) else grid
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) and block for block in blocks):
        raise source.refuse(
            ("grid",), "grid is a list of blocks such as {method: fedasync, method.beta: [0.8, 1.0]}, and not empty"
        )
    if isinstance(grid, dict):
        raise source.refuse(("grid",), "grid is a list of blocks: write '- ' before the first key")
    return tuple(_block(source, number, block, searching) for number, block in enumerate(blocks))


def _block(source: Source, number: int, block: Mapping[str, Any], searching: bool) -> Block:
    fixed: dict[str, Any] = {}
    varied: dict[str, Choice] = {}
    for key, value in block.items():
        path = ("grid", number, key)
        if isinstance(value, dict):
            if not searching:
                raise source.refuse(
                    path,
                    f"{key}: a range needs a search, e.g. search: {{how: random, trials: 20}}; a grid takes a list",
                )
            try:
                varied[key] = construct(Range, value, key)
            except ConfigError as error:
                raise source.refuse(path, str(error)) from None
        elif isinstance(value, list):
            if not value:
                raise source.refuse(path, f"{key}: an empty list makes an empty grid; give at least one value")
            varied[key] = value
        else:
            fixed[key] = value
    if not searching and math.prod(len(values) for values in block.values() if isinstance(values, list)) > MOST_TRIALS:
        raise source.refuse(("grid", number), f"this block makes more than {MOST_TRIALS} trials")
    return Block(number, source.line(("grid", number)), fixed, varied)
