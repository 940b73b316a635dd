"""Configuration: dataclasses hold the defaults, conf/ what its choices change, the command line what a run changes; all is checked first.

    persafl run method=persafl_me method.lam=20 data=digits clients=30

`group=choice` takes conf/group/choice.yaml; `key=value` changes one value. A choice may bring `defaults:` for other keys (a
method its schedule, a data set its model); what the user says wins. docs/configuration.md lists every key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from persafl_lit.buffers import Buffers
from persafl_lit.data import DATASETS
from persafl_lit.errors import ConfigError, closest, shown
from persafl_lit.finetune import FINETUNES
from persafl_lit.limits import MOST_CLIENTS, MOST_STEPS, MOST_VISITS, MOST_WORKERS, at_most
from persafl_lit.models import MODELS
from persafl_lit.nested import GROUPS, flatten, get, put
from persafl_lit.objectives import OBJECTIVES, Moreau, Objective
from persafl_lit.optimizers import Local
from persafl_lit.server import RULES, ControlVariates, Rule
from persafl_lit.settings import ADDED, Checkpoints, Eval, Method, Tracking, choice, positive
from persafl_lit.sharing import Sharing
from persafl_lit.timeline import DELAYS, SCHEDULES, Setting, Timeline
from persafl_lit.typed import coerce, coerced, construct, defaults, hints, keys
from persafl_lit.written import as_mapping, conf_folders, find, flat_keys, load, load_choice, to_yaml
from persafl_lit.written import choices as choices

TABLES: dict[str, Mapping[str, Any]] = {
    "data": DATASETS,
    "model": MODELS,
    "schedule": SCHEDULES,
    "delays": DELAYS,
    "eval.finetune": FINETUNES,
}
"""Groups whose choices are classes; a method is an objective, a rule and what is shared."""
NEUTRAL = ("tracking", "checkpoint", "executor", "workers")
"""Keys that change where and how fast a run goes, but no bit of its result."""
COUNTS = {"clients": MOST_CLIENTS, "local_steps": MOST_STEPS, "batch_size": math.inf, "updates": MOST_VISITS, "workers": MOST_WORKERS}
"""Whole numbers >= 1, and where they end."""
PRECISION_NAMES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}

T = TypeVar("T")


# -- the typed result -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """A whole run, resolved. Groups are plain dicts with their choice as `name`; `build` turns them into objects."""

    method: dict[str, Any] = field(default_factory=choice("persafl_me"))
    """The algorithm: an objective on the clients, a rule on the server, and the schedule that it brings."""
    data: dict[str, Any] = field(default_factory=choice("digits"))
    """What the clients hold."""
    model: dict[str, Any] = field(default_factory=choice("cnn2"))
    """The network that is trained, unless the data set brings its own."""
    schedule: dict[str, Any] = field(default_factory=choice("asynchronous"))
    """When clients read and send, unless the method brings its own."""
    delays: dict[str, Any] = field(default_factory=choice("exponential"))
    """How long clients download, compute, upload and rest."""
    clients: int | None = 30
    """n (the paper: 30); null is as many as the data set brings."""
    local_steps: int = 10
    """Q, the steps of a client between a read and its update (the paper: 10)."""
    eta: float = 0.01
    """Local step size (the paper: 0.01)."""
    batch_size: int = 20
    """Samples per batch."""
    clip: float | None = None
    """The longest direction of a local step, whatever the objective (not of fine-tuning); a longer one is shortened to it. null is none."""
    on_divergence: Literal["stop", "skip"] = "stop"
    """What an update that is not finite does: `stop` ends the run with exit code 3, `skip` leaves it out and counts it."""
    horizon: float | None = 100.0
    """End of the run in simulated time; null where `updates` or a replayed file ends it. Setting `updates` alone makes it null."""
    updates: int | None = None
    """End of the run after so many client updates; with `horizon` too, whichever comes first."""
    seed: int = 0
    """Names every random stream."""
    accelerator: str = "cpu"
    """As in Lightning Fabric: `cpu`, `cuda`, `mps`, `auto`."""
    devices: int | tuple[int, ...] | str = 1
    """As in Lightning Fabric; one device."""
    precision: str = "32-true"
    """As in Lightning Fabric: `32-true`, `64-true`, `bf16-mixed`, `bf16-true`. With bfloat16, gradients differ in the second digit."""
    derivatives: Literal["auto", "autograd"] = "auto"
    """Hand-written kernels where the network is a plain sequence of known layers, else autograd; or `autograd` always."""
    executor: Literal["serial", "processes", "ray"] = "processes"
    """Who trains: this process, one process per worker, or the cluster that RAY_ADDRESS names, else a local one. All give the same bits."""
    workers: int | None = None
    """Workers that train at the same time; null is one per core."""
    allow_code: bool = False
    """Let `model=custom` import code of yours."""
    local: Local = field(default_factory=Local)
    """The optimizer of local steps."""
    eval: Eval = field(default_factory=Eval)
    """Evaluation."""
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    """Checkpoints."""
    tracking: Tracking = field(default_factory=Tracking)
    """Tracking in MLflow."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", PRECISION_NAMES.get(self.precision, self.precision))
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

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """The same as one nested dict of plain values."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

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
        return dataclasses.replace(
            self, model={"name": "custom", "path": path, "args": dict(args), **{key: self.model[key] for key in keys(Buffers)}}
        )

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

    def buffers(self) -> Buffers:
        return construct(Buffers, {key: self.model[key] for key in keys(Buffers)}, "model")

    def rule(self, clients: int, timeline: Timeline) -> Rule:
        cls = choice_of("method.rule", self.method["rule"], RULES)
        values = {key: self.method[key] for key in keys(cls)}
        if values.get("buffer") == "cohort":
            values["buffer"] = self._cohort(timeline)
        rule = construct(cls, values, "method")
        if isinstance(rule, ControlVariates):
            rule = dataclasses.replace(rule, clients=clients)
        if self.objective().sends != rule.receives:
            raise ConfigError("method.objective=scaffold and method.rule=control_variates go together or not at all")
        rule.check(timeline)
        return self.buffers().around(rule, clients)

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
        content = load_choice(schedule, "schedule", conf_folders())
        _defaults(content, "schedule")
        values = _typed("schedule", _complete("schedule", {**content, "name": schedule}))
        if "cohort" in values:
            values["cohort"] = min(values["cohort"], clients)
        return dataclasses.replace(self, schedule=values)

    def build(self, group: str, table: Mapping[str, Any]) -> Any:
        """The object that a group's dict describes."""
        values = self.eval.finetune if group == "eval.finetune" else getattr(self, group)
        cls = choice_of(group, values["name"], table)
        return construct(cls, {key: value for key, value in values.items() if key in keys(cls)}, group)


SECTIONS = {*GROUPS, *(key for key, hint in hints(Config).items() if dataclasses.is_dataclass(hint))}
"""Keys that hold keys."""


# -- composition ------------------------------------------------------------------------------------------------------


def compose(overrides: Iterable[str] | Mapping[str, Any] = (), conf: Sequence[Path] | None = None) -> Config:
    """The classes' defaults, then conf/config.yaml, the choices and what they bring, an experiment's values, the overrides."""
    folders = conf_folders() if conf is None else conf
    asked = flat_overrides(overrides)
    ends_by_updates = asked.get("updates") is not None and "horizon" not in asked
    if (preset := asked.pop("experiment", None)) is not None:
        described = load_choice(coerce(str, preset, "experiment"), "experiment", folders)
        asked = {**flat_keys(described, SECTIONS), **asked}
    explicit = set(asked)
    if ends_by_updates or (asked.get("updates") is not None and "horizon" not in explicit):
        asked["horizon"] = None

    values = dataclasses.asdict(Config())
    usual = {key: get(values, key)["name"] for key in GROUPS} | flat_keys(load(find("config.yaml", folders), "config"), SECTIONS)
    for key, value in usual.items():
        if key not in GROUPS:
            put(values, key, value, SECTIONS)
    chosen: dict[str, Any] = {key: asked.pop(key) for key in GROUPS if key in asked}
    for key in ("data", "method", "schedule", "model", "delays", "eval.finetune"):
        name = coerce(str, chosen.get(key, usual[key]), key)
        content = load_choice(name, key, folders)
        for other, default in _defaults(content, key).items():
            if other in GROUPS:
                chosen.setdefault(other, default)
            elif other not in explicit:
                put(values, other, default, SECTIONS)
        if key == "method":
            content |= {part: asked[f"method.{part}"] for part in keys(Method) if f"method.{part}" in asked}
        _set_group(values, key, _complete(key, {**content, "name": name}))
    for key, value in asked.items():
        put(values, key, value, SECTIONS)
    for key in GROUPS:
        _set_group(values, key, _typed(key, get(values, key)))
    config = construct(Config, values, "")
    config.objective()
    config.sharing()
    config.buffers()
    config.local.check(config.objective())
    return config


def flat_overrides(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Overrides under dotted keys."""
    return flat_keys(as_mapping(overrides), SECTIONS)


def _defaults(content: dict[str, Any], key: str) -> dict[str, Any]:
    """What a choice brings for other keys."""
    found = content.pop("defaults", None) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"the defaults that a {key} brings must be keys and values; got {shown(found)}")
    return found


def _set_group(values: dict[str, Any], key: str, content: dict[str, Any]) -> None:
    *parents, last = key.split(".")
    (get(values, ".".join(parents)) if parents else values)[last] = content


def _complete(key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A group's values with the defaults of its classes. A method leaves out what only other objectives and rules have."""
    known = {name: default for cls in _classes(key, values) for name, default in defaults(cls).items()}
    others = (*OBJECTIVES.values(), *RULES.values()) if key == "method" else ()
    allowed = [*known, *(name for cls in others for name in keys(cls))]
    for name in values:
        if name != "name" and name not in allowed:
            raise ConfigError(
                f"unknown key {shown(f'{key}.{name}')}; {key}={values['name']} has {', '.join(known) or 'no keys'}.{closest(name, allowed)}"
            )
    return {"name": values["name"], **{name: values.get(name, default) for name, default in known.items()}}


def _typed(key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A group's values as its classes declare them: schedule.tau=3.0 is 3, and the same run."""
    typed: dict[str, Any] = {"name": values["name"]}
    for cls in _classes(key, values):
        typed |= coerced(cls, {name: values[name] for name in keys(cls)}, key)
    return typed


def _classes(key: str, values: Mapping[str, Any]) -> list[type]:
    """The classes that own a group's keys."""
    if key != "method":
        return [choice_of(key, values["name"], TABLES[key]), *([Buffers] if key == "model" else [])]
    parts = coerced(Method, {name: values[name] for name in keys(Method) if name in values}, key)
    objective, rule = choice_of("method.objective", parts["objective"], OBJECTIVES), choice_of("method.rule", parts["rule"], RULES)
    return [Method, objective, rule, Sharing]


def without(values: Mapping[str, Any], path: Sequence[str], usual: Any) -> dict[str, Any]:
    """The values without the key at `path`, if it is there and has this value, and without a section that is left empty."""
    first, *rest = path
    if first not in values or (not rest and values[first] != usual):
        return dict(values)
    left = {key: value for key, value in values.items() if key != first}
    inside = without(values[first], rest, usual) if rest else {}
    return {**left, first: inside} if inside else left


def choice_of(key: str, name: Any, table: Mapping[str, T]) -> T:
    if not isinstance(name, str) or name not in table:
        raise ConfigError(f"unknown {key} {shown(name)}; there are {', '.join(table)}.{closest(str(name), table)}")
    return table[name]
