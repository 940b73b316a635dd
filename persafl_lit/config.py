"""Configuration: one YAML per choice in conf/, composed and overridden from the command line, checked before anything runs.

    persafl run method=persafl_me method.lam=20 data=digits clients=30

`group=choice` takes conf/group/choice.yaml; `key=value` changes one value. A choice may bring `defaults:` for other keys (a
method its schedule, a data set its model); what the user says wins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from persafl_lit.errors import ConfigError, closest, shown
from persafl_lit.limits import MOST_CLIENTS, MOST_STEPS, MOST_VISITS, MOST_WORKERS, at_most
from persafl_lit.nested import GROUPS, flatten, get, put
from persafl_lit.objectives import OBJECTIVES, Moreau, Objective
from persafl_lit.server import RULES, ControlVariates, Rule
from persafl_lit.settings import Checkpoints, Eval, Tracking, positive
from persafl_lit.sharing import Sharing
from persafl_lit.timeline import DELAYS, SCHEDULES, Setting, Timeline
from persafl_lit.typed import coerce, construct, keys
from persafl_lit.written import as_mapping, conf_folders, find, flat_keys, load, load_choice, to_yaml
from persafl_lit.written import choices as choices

NEUTRAL = ("tracking", "checkpoint", "executor", "workers")
"""Keys that change where and how fast a run goes, but no bit of its result."""
ADDED: dict[str, Any] = {"derivatives": "auto", "delays.per_gradient": 0.0, "method.private": ["none"]}
"""Keys that 0.1 did not have, with the value that means what it did: they are no part of a run's name then."""
COUNTS = {"clients": MOST_CLIENTS, "local_steps": MOST_STEPS, "batch_size": math.inf, "updates": MOST_VISITS, "workers": MOST_WORKERS}
"""Whole numbers >= 1, and where they end."""
PRECISION_NAMES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}

T = TypeVar("T")


# -- the typed result -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """A whole run, resolved. Groups are plain dicts with their choice as `name`; `build` turns them into objects."""

    method: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    schedule: dict[str, Any]
    delays: dict[str, Any]
    clients: int | None
    local_steps: int
    eta: float
    batch_size: int
    clip: float | None
    """The longest gradient of a local step; a longer one is shortened to it. null is none."""
    on_divergence: Literal["stop", "skip"]
    """What a non-finite update does: end the run, or get lost and counted."""
    horizon: float | None
    updates: int | None
    seed: int
    accelerator: str
    devices: int | tuple[int, ...] | str
    precision: str
    derivatives: Literal["auto", "autograd"]
    """Hand-written kernels where the network is a plain sequence of known layers, else autograd; or autograd always."""
    executor: Literal["serial", "processes", "ray"]
    workers: int | None
    """Lanes that train at the same time; null is one per core."""
    allow_code: bool
    eval: Eval
    checkpoint: Checkpoints
    tracking: Tracking
    values: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The same as one nested dict of plain values."""

    def __post_init__(self) -> None:
        for name, most in COUNTS.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1; got {value}")
            at_most(name, value, most)
        for name in ("eta", "clip", "horizon"):
            positive(name, getattr(self, name))
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be a whole number from 0 to 2^63 - 1; got {self.seed}")
        if self.horizon is None and self.updates is None and self.schedule["name"] != "replay":
            raise ConfigError("the run never ends: set horizon (simulated time), updates, or both")

    @property
    def name(self) -> str:
        return str(self.method["name"])

    def hash(self) -> str:
        """A name for the run's result: equal configs, up to keys that change no bit of it, have equal hashes."""
        telling = {key: value for key, value in self.values.items() if key not in NEUTRAL}
        for key, usual in ADDED.items():
            telling = without(telling, key.split("."), usual)
        return hashlib.sha256(json.dumps(telling, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def checkpoint_path(self) -> Path:
        """Where an interrupted run of this config is kept."""
        return Path(self.checkpoint.dir or "mlruns/checkpoints") / f"{self.hash()}.pt"

    def with_model(self, path: str, args: Mapping[str, Any]) -> Config:
        """The same run around a model that was passed from Python: recorded, and told from others, by its class and `args`."""
        model = {"name": "custom", "path": path, "args": dict(args)}
        return dataclasses.replace(self, model=model, values={**self.values, "model": model})

    def label(self) -> str:
        """A short name that tells this run from others: the method, what was set otherwise than by default, the seed."""
        chosen = {key: get(self.values, key)["name"] for key in GROUPS}
        usual = compose({key: choice for key, choice in chosen.items() if key in ("method", "data")}).flat()
        skipped = (*NEUTRAL, "seed", "eval", "allow_code")
        changed = {
            key: value
            for key, value in self.flat().items()
            if key.split(".")[0] not in skipped and value is not None and usual.get(key, value) != value
        }
        settings = [f"{key.removesuffix('.name').removeprefix('method.').removeprefix('schedule.')}={value}" for key, value in changed.items()]
        return " ".join([self.name, *([] if chosen["data"] == "digits" else [chosen["data"]]), *settings, f"seed={self.seed}"])[:250]

    def flat(self) -> dict[str, Any]:
        """Dotted keys and values, as on the command line."""
        return dict(flatten(self.values))

    def yaml(self) -> str:
        return to_yaml(self.values)

    # -- objects that need neither torch nor data ---------------------------------------------------------------------

    def objective(self) -> Objective:
        cls = choice_of("method.objective", self.method["objective"], OBJECTIVES)
        return construct(cls, {key: self.method[key] for key in keys(cls)}, "method")

    def sharing(self) -> Sharing:
        return construct(Sharing, {key: self.method[key] for key in keys(Sharing)}, "method")

    def rule(self, clients: int, timeline: Timeline) -> Rule:
        cls = choice_of("method.rule", self.method["rule"], RULES)
        values = {key: self.method[key] for key in keys(cls) if key != "clients"}
        if values.get("buffer") == "cohort":
            values["buffer"] = self._cohort(timeline)
        if issubclass(cls, ControlVariates):
            values["clients"] = clients
        rule = construct(cls, values, "method")
        if self.objective().sends != rule.receives:
            raise ConfigError("method.objective=scaffold and method.rule=control_variates go together or not at all")
        rule.check(timeline)
        return rule

    def _cohort(self, timeline: Timeline) -> int:
        """method.buffer=cohort: the size of a round, from the schedule or from a replayed file."""
        if self.schedule["name"] == "rounds":
            return int(self.schedule["cohort"])
        if self.method["rule"] == "control_variates" and self.schedule["name"] != "replay":
            raise ConfigError(f"scaffold needs whole rounds, without staleness; schedule={self.schedule['name']} has none: use schedule=rounds")
        cohort = math.gcd(*timeline.reads.tolist())
        if self.schedule["name"] != "replay" or cohort == 0 or timeline.staleness(cohort).any():
            raise ConfigError(
                f"method.buffer=cohort waits for whole rounds, but schedule={self.schedule['name']} has none here; "
                "set method.buffer to a number or use schedule=rounds"
            )
        return cohort

    def timeline(self, clients: int) -> Timeline:
        """The communication setup: the same for every method with the same schedule, delays, clients and seed, and with
        `delays.per_gradient` > 0 also the same number of gradients per local step."""
        delays, objective = self.build("delays", DELAYS), self.objective()
        if getattr(delays, "per_gradient", 0) > 0 and isinstance(objective, Moreau) and objective.inner_steps is None:
            raise ConfigError(
                f"delays.per_gradient={delays.per_gradient:g} needs the number of gradients per local step beforehand, and method.nu alone does not "
                "give it; set method.inner_steps, or delays.per_gradient=0"
            )
        setting = Setting(clients, self.local_steps, delays, self.seed, self.horizon, self.updates, objective.cost)
        timeline: Timeline = self.build("schedule", SCHEDULES).timeline(setting)
        return timeline

    def beside(self, schedule: str, clients: int) -> Config:
        """The same config under another schedule with its default settings, for comparison."""
        values = {key: value for key, value in load_choice(schedule, "schedule", conf_folders()).items() if key != "defaults"}
        if "cohort" in values:
            values["cohort"] = min(values["cohort"], clients)
        return dataclasses.replace(self, schedule={"name": schedule, **values})

    def build(self, group: str, table: Mapping[str, Any]) -> Any:
        """The object that a group's dict describes."""
        values = self.eval.finetune if group == "eval.finetune" else getattr(self, group)
        cls = choice_of(group, values["name"], table)
        return construct(cls, {key: value for key, value in values.items() if key != "name"}, group)


# -- composition ------------------------------------------------------------------------------------------------------


def compose(overrides: Iterable[str] | Mapping[str, Any] = (), conf: Sequence[Path] | None = None) -> Config:
    """conf/config.yaml, then the choices, then their defaults, then an experiment's values, then the overrides."""
    folders = conf_folders() if conf is None else conf
    asked = as_mapping(overrides)
    ends_by_updates = asked.get("updates") is not None and "horizon" not in asked
    preset = asked.pop("experiment", None)
    if preset is not None:
        described = load_choice(preset, "experiment", folders)
        asked = {**flat_keys(described), **asked}
    values = load(find("config.yaml", folders), "config")
    explicit = set(asked)
    if ends_by_updates or (asked.get("updates") is not None and "horizon" not in explicit):
        asked["horizon"] = None

    chosen: dict[str, Any] = {key: asked.pop(key) for key in list(GROUPS) if key in asked}
    for key in ("data", "method", "schedule", "model", "delays", "eval.finetune"):
        choice = chosen.get(key, get(values, key))
        content = load_choice(choice, key, folders)
        for other, default in _defaults(content, key).items():
            if other in GROUPS:
                chosen.setdefault(other, default)
            elif other not in explicit:
                put(values, other, default)
        put(values, key, {"name": choice, **content})
    method_settings = {key: value for key, value in asked.items() if key in ("method.objective", "method.rule")}
    for key, value in method_settings.items():
        put(values, key, value)
    _fit_method(values["method"])
    for key, value in asked.items():
        put(values, key, value, must_exist=True)
    _type_groups(values)
    values["precision"] = PRECISION_NAMES.get(str(values.get("precision")), values.get("precision"))
    config = construct(Config, {**values, "values": {}}, "")
    plain = {key: value for key, value in dataclasses.asdict(config).items() if key != "values"}
    object.__setattr__(config, "values", json.loads(json.dumps(plain)))
    config.objective()
    return config


def _defaults(content: dict[str, Any], key: str) -> dict[str, Any]:
    """What a choice brings for other keys."""
    found = content.pop("defaults", None) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"the defaults that a {key} brings must be keys and values; got {shown(found)}")
    return found


def _type_groups(values: dict[str, Any]) -> None:
    """Values as their classes declare them: schedule.tau=3.0 is 3, and the same run. (Data, models and fine-tuning need torch:
    there the default's type decides.)"""
    tables: dict[str, list[Mapping[str, Any]]] = {"method": [OBJECTIVES, RULES], "schedule": [SCHEDULES], "delays": [DELAYS]}
    for group, found in tables.items():
        names = (values[group]["objective"], values[group]["rule"]) if group == "method" else (values[group]["name"],)
        for cls in (choice_of(group, name, table) for name, table in zip(names, found, strict=True)):
            hints = typing.get_type_hints(cls)
            for key in keys(cls):
                value = values[group].get(key)
                if value is not None and value != "cohort":
                    values[group][key] = coerce(hints[key], value, f"{group}.{key}")
    finetune = values["eval"]["finetune"]
    if type(finetune.get("lr")) is int:
        finetune["lr"] = float(finetune["lr"])


def _fit_method(method: dict[str, Any]) -> None:
    """A method has the keys of its objective and of its rule, and no others."""
    objective = choice_of("method.objective", method.get("objective"), OBJECTIVES)
    rule = choice_of("method.rule", method.get("rule"), RULES)
    owned = [*keys(objective), *(key for key in keys(rule) if key != "clients"), *keys(Sharing)]
    defaults = {f.name: f.default for cls in (objective, rule, Sharing) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    fitted = {key: method.get(key, defaults[key]) for key in owned}
    fitted["private"] = list(construct(Sharing, {"private": fitted["private"]}, "method").private)
    kept = {key: method[key] for key in ("name", "objective", "rule")}
    method.clear()
    method.update(kept | fitted)


def without(values: Mapping[str, Any], path: Sequence[str], usual: Any) -> dict[str, Any]:
    """The values without the key at `path`, if it is there and has this value."""
    first, *rest = path
    if first not in values or (not rest and values[first] != usual):
        return dict(values)
    left = {key: value for key, value in values.items() if key != first}
    return {**left, first: without(values[first], rest, usual)} if rest else left


def choice_of(key: str, name: Any, table: Mapping[str, T]) -> T:
    if not isinstance(name, str) or name not in table:
        raise ConfigError(f"unknown {key} {shown(name)}; there are {', '.join(table)}.{closest(str(name), table)}")
    return table[name]
