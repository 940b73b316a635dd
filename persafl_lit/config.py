"""Configuration: one YAML per choice in conf/, composed and overridden from the command line, checked before anything runs.

    persafl run method=persafl_me method.lam=20 data=digits clients=30

`group=choice` takes conf/group/choice.yaml; `key=value` changes one value. A choice may bring `defaults:` for other keys (a
method its schedule, a data set its model); what the user says wins. The only module that knows OmegaConf.
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

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from persafl_lit.errors import ConfigError, closest, first_line
from persafl_lit.nested import GROUPS, flatten, get, put
from persafl_lit.objectives import OBJECTIVES, Objective
from persafl_lit.server import RULES, ControlVariates, Rule
from persafl_lit.timeline import DELAYS, SCHEDULES, Setting, Timeline
from persafl_lit.typed import construct, keys

NEUTRAL = ("tracking", "checkpoint", "executor", "workers")
"""Keys that change where and how fast a run goes, but no bit of its result."""
PRECISION_NAMES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}

T = TypeVar("T")


# -- the typed result -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Eval:
    every: float | None
    """Simulated time between evaluations; null is a tenth of the run, or less often so that evaluation costs at most a quarter."""
    finetune: dict[str, Any]
    beside: tuple[str, ...]
    """Further fine-tuning rules for the last evaluation; `own` is the method's."""
    clients: int | None
    """Evaluate only so many clients, drawn by the seed; null is all."""
    gradient: bool
    """Also measure |grad F(w)|^2 of the method's own cost, over all data: what the theorems bound."""

    def __post_init__(self) -> None:
        _positive("eval.every", self.every)
        if self.clients is not None and self.clients < 1:
            raise ConfigError(f"eval.clients must be >= 1 or null; got {self.clients}")


@dataclass(frozen=True)
class Checkpoints:
    every: int
    """Updates between checkpoints; 0 writes one only when asked to stop."""
    dir: str | None
    """Folder of checkpoints; null is mlruns/checkpoints."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"checkpoint.every must be >= 0 updates; got {self.every}")


@dataclass(frozen=True)
class Tracking:
    enabled: bool
    uri: str | None
    """An MLflow tracking URI; null is MLFLOW_TRACKING_URI, else the sqlite store mlruns/mlflow.db."""
    experiment: str
    model: bool
    """Keep the final model, in MLflow's format."""
    figures: bool
    """Keep a picture of the run."""
    patience: float
    """Seconds of wall time that the end of a run waits for a store that is away."""


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
    horizon: float | None
    updates: int | None
    seed: int
    accelerator: str
    devices: int | tuple[int, ...] | str
    precision: str
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
        for name in ("clients", "local_steps", "batch_size", "updates", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1; got {value}")
        _positive("eta", self.eta)
        _positive("horizon", self.horizon)
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
        return hashlib.sha256(json.dumps(telling, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def checkpoint_path(self) -> Path:
        """Where an interrupted run of this config is kept."""
        return Path(self.checkpoint.dir or "mlruns/checkpoints") / f"{self.hash()}.pt"

    def with_model(self, path: str) -> Config:
        """The same run around a model that was passed from Python: recorded, and told from others, by its class."""
        model = {"name": "custom", "path": path, "args": {}}
        return dataclasses.replace(self, model=model, values={**self.values, "model": model})

    def label(self) -> str:
        """A short name that tells this run from others: the method, what was set otherwise than by default, the seed."""
        choices = {key: get(self.values, key)["name"] for key in GROUPS}
        usual = compose({key: choice for key, choice in choices.items() if key in ("method", "data")}).flat()
        skipped = (*NEUTRAL, "seed", "eval", "allow_code")
        changed = {
            key: value
            for key, value in self.flat().items()
            if key.split(".")[0] not in skipped and value is not None and usual.get(key, value) != value
        }
        settings = [f"{key.removesuffix('.name').removeprefix('method.').removeprefix('schedule.')}={value}" for key, value in changed.items()]
        return " ".join([self.name, *([] if choices["data"] == "digits" else [choices["data"]]), *settings, f"seed={self.seed}"])[:250]

    def flat(self) -> dict[str, Any]:
        """Dotted keys and values, as on the command line."""
        return dict(flatten(self.values))

    def yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.values))

    # -- objects that need neither torch nor data ---------------------------------------------------------------------

    def objective(self) -> Objective:
        cls = choice_of("method.objective", self.method["objective"], OBJECTIVES)
        return construct(cls, {key: self.method[key] for key in keys(cls)}, "method")

    def rule(self, clients: int, timeline: Timeline) -> Rule:
        cls = choice_of("method.rule", self.method["rule"], RULES)
        values = {key: self.method[key] for key in keys(cls) if key != "clients"}
        if values.get("buffer") == "cohort":
            values["buffer"] = self._cohort(timeline)
        if issubclass(cls, ControlVariates):
            values["clients"] = clients
        rule = construct(cls, values, "method")
        if self.objective().control != isinstance(rule, ControlVariates):
            raise ConfigError("method.objective=scaffold and method.rule=control_variates go together or not at all")
        rule.check(timeline)
        return rule

    def _cohort(self, timeline: Timeline) -> int:
        """method.buffer=cohort: the size of a round, from the schedule or from a replayed file."""
        if self.schedule["name"] == "rounds":
            return int(self.schedule["cohort"])
        cohort = math.gcd(*timeline.reads.tolist())
        if self.schedule["name"] != "replay" or cohort == 0 or timeline.staleness(cohort).any():
            raise ConfigError(
                f"method.buffer=cohort waits for whole rounds, but schedule={self.schedule['name']} has none here; "
                "set method.buffer to a number or use schedule=rounds"
            )
        return cohort

    def timeline(self, clients: int) -> Timeline:
        """The communication setup: the same for every method with the same schedule, delays, clients and seed."""
        delays = self.build("delays", DELAYS)
        setting = Setting(clients, self.local_steps, delays, self.seed, self.horizon, self.updates)
        timeline: Timeline = self.build("schedule", SCHEDULES).timeline(setting)
        return timeline

    def beside(self, schedule: str, clients: int) -> Config:
        """The same config under another schedule with its default settings, for comparison."""
        values = {key: value for key, value in _load_choice(schedule, "schedule", conf_folders()).items() if key != "defaults"}
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
    asked = overrides_of(overrides)
    ends_by_updates = asked.get("updates") is not None and "horizon" not in asked
    preset = asked.pop("experiment", None)
    if preset is not None:
        described = _load_choice(preset, "experiment", folders)
        asked = {**_plain_keys(described), **asked}
    values = _load(_find("config.yaml", folders), "config")
    explicit = set(asked)
    if ends_by_updates or (asked.get("updates") is not None and "horizon" not in explicit):
        asked["horizon"] = None

    chosen: dict[str, Any] = {key: asked.pop(key) for key in list(GROUPS) if key in asked}
    for key in ("data", "method", "schedule", "model", "delays", "eval.finetune"):
        choice = chosen.get(key, get(values, key))
        content = _load_choice(choice, key, folders)
        for other, default in (content.pop("defaults", None) or {}).items():
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
    values["precision"] = PRECISION_NAMES.get(str(values["precision"]), values["precision"])
    config = construct(Config, {**values, "values": {}}, "")
    plain = {key: value for key, value in dataclasses.asdict(config).items() if key != "values"}
    object.__setattr__(config, "values", json.loads(json.dumps(plain)))
    config.objective()
    return config


def _fit_method(method: dict[str, Any]) -> None:
    """A method has the keys of its objective and of its rule, and no others."""
    objective = choice_of("method.objective", method["objective"], OBJECTIVES)
    rule = choice_of("method.rule", method["rule"], RULES)
    owned = [*keys(objective), *(key for key in keys(rule) if key != "clients")]
    defaults = {f.name: f.default for cls in (objective, rule) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    fitted = {key: method.get(key, defaults[key]) for key in owned}
    kept = {key: method[key] for key in ("name", "objective", "rule")}
    method.clear()
    method.update(kept | fitted)


def overrides_of(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(overrides, Mapping):
        return _plain_keys(dict(overrides))
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of 'key=value' strings or a dict; got the string {overrides!r}")
    asked = {}
    for text in overrides:
        key, equals, value = str(text).partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{text!r} is not an override; write key=value, e.g. method=persafl_me or eta=0.05")
        asked[key.strip()] = _parse(value, key.strip())
    return asked


def _plain_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts as dotted keys; a group's dict with a `name` is its choice and then its values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and key != "model.args":
            inner = dict(value)
            if key in GROUPS and "name" in inner:
                flat[key] = inner.pop("name")
            flat.update(_plain_keys({f"{key}.{name}": part for name, part in inner.items()}))
        else:
            flat[key] = value
    return flat


def _parse(text: str, key: str) -> Any:
    """A value as YAML means it (with 1e-3 a number)."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=True)["value"]  # type: ignore[index,call-overload]
    except (OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {text!r} cannot be read as a value: {first_line(error)}") from None


# -- files ------------------------------------------------------------------------------------------------------------


def conf_folders() -> list[Path]:
    """conf/ inside an installed package, or beside the package in a checkout."""
    here = Path(__file__).resolve().parent
    return [folder for folder in (here / "conf", here.parent / "conf") if (folder / "config.yaml").is_file()][:1]


def choices(group: str, conf: Sequence[Path] | None = None) -> dict[str, str]:
    """Every choice of a group and the one line that its file begins with."""
    found = {}
    for folder in conf_folders() if conf is None else conf:
        for path in sorted((folder / group).glob("*.yaml")):
            found[path.stem] = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return found


def _load_choice(choice: Any, key: str, folders: Sequence[Path]) -> dict[str, Any]:
    group = GROUPS.get(key, key)
    known = choices(group, folders)
    if not isinstance(choice, str) or choice not in known:
        raise ConfigError(f"unknown {key} {choice!r}; conf/{group} has {', '.join(known)}.{closest(str(choice), known)}")
    return _load(_find(f"{group}/{choice}.yaml", folders), key)


def _find(name: str, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"no {name} in {', '.join(map(str, folders)) or 'any conf folder'}; the installation is incomplete")


def _load(path: Path, key: str) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys and values for {key}; got {type(content).__name__}")
    return typing.cast("dict[str, Any]", content)


def choice_of(key: str, name: Any, table: Mapping[str, T]) -> T:
    if not isinstance(name, str) or name not in table:
        raise ConfigError(f"unknown {key} {name!r}; there are {', '.join(table)}.{closest(str(name), table)}")
    return table[name]


def _positive(key: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(f"{key} must be > 0; got {value!r}")
