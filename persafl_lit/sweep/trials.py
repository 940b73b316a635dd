"""The trials of a plan: every one a whole config, known by its hash. A trial that cannot be is refused here, before any
begins."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persafl_lit.common.seeding import rng
from persafl_lit.config.compose import Config, compose
from persafl_lit.config.groups import GROUP_CLASSES
from persafl_lit.errors import ConfigError, PersaflError
from persafl_lit.report import config_keys
from persafl_lit.sweep.plan import Block, Plan, Range
from persafl_lit.timeline import Rounds, Timeline

DIGITS = 4
"""Of a value drawn from a range: enough to differ, and short in a name."""

Varied = Mapping[str, Any]
"""The varied keys of a block and their values."""


@dataclass(frozen=True)
class Trial:
    config: Config
    block: Block
    setting: Varied
    hash: str

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def method(self) -> str:
        return self.config.name

    @property
    def grid_values(self) -> Varied:
        """What its block sets beside the method, fixed or varied; as the config has it."""
        flat = self.config.flat()
        asked = {**self.block.fixed, **self.setting}
        return {key: flat.get(key, value) for key, value in asked.items() if key != "method"}

    @property
    def setting_text(self) -> str:
        return " ".join(f"{short_key(key)}={value}" for key, value in self.grid_values.items())

    @property
    def name(self) -> str:
        """What tells it from the others of its sweep: `persafl_me lam=20.0 beta=0.8 seed=0`."""
        return " ".join(filter(None, [self.method, self.setting_text, f"seed={self.seed}"]))[:250]

    @functools.cached_property
    def group(self) -> tuple[config_keys.KeyValues, str, str]:
        """Task, method and schedule: settings are chosen among trials of one group. A task is what a report takes for
        one: data, model, delays, length and evaluation."""
        return config_keys.task_of(self.config.flat()), self.method, self.config.schedule["name"]


def short_key(key: str) -> str:
    return key.removeprefix("method.").removeprefix("schedule.")


def first_trials(plan: Plan) -> list[Trial]:
    """All trials of a grid or a random search; in two stages those on the first seed."""
    seeds = plan.seeds[:1] if plan.two_stages else plan.seeds
    settings = ((block, setting) for block in plan.blocks for setting in _settings(plan, block))
    return distinct(plan, (make_trial(plan, block, setting, seed) for block, setting in settings for seed in seeds))


def on_other_seeds(plan: Plan, trials: Sequence[Trial]) -> list[Trial]:
    """The second stage: these settings on the seeds that they have not seen."""
    return distinct(
        plan, (make_trial(plan, trial.block, trial.setting, seed) for trial in trials for seed in plan.seeds[1:])
    )


def distinct(plan: Plan, trials: Iterable[Trial]) -> list[Trial]:
    """Refuse what would be done twice."""
    known: dict[str, Trial] = {}
    for trial in trials:
        other = known.setdefault(trial.hash, trial)
        if other is not trial:
            raise ConfigError(
                f"{plan.place(trial.block)}: the trial '{trial.name}' is there twice (also "
                f"{plan.place(other.block)}); remove one of the two"
            )
    return list(known.values())


def make_trial(plan: Plan, block: Block, setting: Varied, seed: int) -> Trial:
    asked = {**plan.overrides, **block.fixed, **setting, "seed": seed}
    own = {"executor": "serial", "tracking.experiment": plan.name, "checkpoint.dir": f"mlruns/checkpoints/{plan.name}"}
    try:
        config = compose(own | asked)
        _build_parts(config)
    except PersaflError as error:
        if any(f"'{key}'" in str(error) for key in plan.overrides):
            raise ConfigError(f"{plan.source.name}, overrides: {error}") from None
        keys = [key for key in (*block.varied, *block.fixed) if key in str(error)]
        raise ConfigError(f"{plan.place(block, max(keys, key=len) if keys else None)}: {error}") from None
    if not config.tracking.enabled:
        raise ConfigError("a sweep knows by tracking what is done: remove tracking.enabled=false")
    return Trial(config, block, setting, config.hash())


def timeline_of(config: Config) -> Timeline | None:
    """None where only the data, or a file that is not here, say what it is."""
    if config.clients is None:
        return None
    try:
        return config.timeline(config.clients - int(config.data.get("holdout_clients", 0)))
    except PersaflError:
        return None


def _build_parts(config: Config) -> None:
    """Refuse values that no part can have."""
    for group in GROUP_CLASSES:
        part = config.build(group)
        if isinstance(part, Rounds) and config.clients is not None:
            part.check(config.clients)


# -- settings ---------------------------------------------------------------------------------------------------------


def _settings(plan: Plan, block: Block) -> Iterator[Varied]:
    if plan.search is not None:
        yield from _random(plan, block, plan.search.trials)
        return
    for values in itertools.product(*block.varied.values()):  # type: ignore[arg-type]
        yield dict(zip(block.varied, values, strict=True))


def _random(plan: Plan, block: Block, count: int) -> Iterator[Varied]:
    """Distinct settings by chance: fixed by the search's seed, so that a sweep begun again has the same trials."""
    assert plan.search is not None
    seen: list[Varied] = []
    for attempt in range(20 * count):
        if len(seen) == count:
            return
        stream = rng(plan.search.seed, "search", block.number, attempt)
        setting = {key: _draw(choice, float(stream.random())) for key, choice in block.varied.items()}
        if setting not in seen:
            seen.append(setting)
            yield setting


def _draw(choice: Sequence[Any] | Range, chance: float) -> Any:
    if not isinstance(choice, Range):
        return choice[int(chance * len(choice))]
    if choice.whole:
        return int(choice.low) + int(chance * (int(choice.high) - int(choice.low) + 1))
    low, high = (math.log(choice.low), math.log(choice.high)) if choice.log else (choice.low, choice.high)
    value = low + chance * (high - low)
    return rounded(math.exp(value) if choice.log else value)


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
