"""Configuration: dataclasses hold the defaults, conf/ what its choices change, the command line what a run changes; all
is checked first.

    persafl run method=persafl_me method.lam=20 data=digits clients=30

`group=choice` takes conf/group/choice.yaml, of yours or ours, or a class by entry point or dotted path; `key=value`
changes one value. A choice may bring `defaults:` for other keys (a method its schedule, a data set its model); what the
user says wins. A composed config is complete: it composes to itself also where the files that it was made of are not.
docs/configuration.md lists every key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from persafl_lit.common.limits import MOST_CLIENTS, MOST_STEPS, MOST_VISITS, MOST_WORKERS, at_most
from persafl_lit.common.plugins import exits_refused
from persafl_lit.config.coerce import coerce, coerced, construct, hints, keys
from persafl_lit.config.groups import GROUP_CLASSES, completed, owners_of, set_group, take_defaults, typed_group
from persafl_lit.config.parse import (
    as_mapping,
    conf_folders,
    find,
    find_choice,
    flat_keys,
    load,
    load_choice,
    our_conf,
    to_yaml,
)
from persafl_lit.config.parse import choices as choices
from persafl_lit.config.paths import GROUPS, flatten, get, put
from persafl_lit.config.registry import (
    is_class,
    make,
    make_listed,
    make_metric,
    record,
    resolve,
    same,
    source_of,
    source_of_path,
)
from persafl_lit.config.schema import ADDED, Checkpoints, Eval, Method, Tracking, choice, positive
from persafl_lit.data import DATASETS, CustomData
from persafl_lit.errors import ConfigError, PersaflError, TimelineError, located, shown
from persafl_lit.learning.local_optimizers import Local
from persafl_lit.learning.metric_names import SIGNS
from persafl_lit.learning.objectives import Moreau, Objective
from persafl_lit.learning.personal_models import PersonalModel
from persafl_lit.learning.sharing import Sharing
from persafl_lit.server.buffers import Buffers
from persafl_lit.server.latest_updates import LatestUpdates
from persafl_lit.server.rules import ControlVariates, Rule
from persafl_lit.timeline import SCHEDULES, Setting, Timeline, check_timeline

if TYPE_CHECKING:
    from persafl_lit.data import Federation

PARTS = {
    "objective": "method.objective",
    "rule": "method.rule",
    "personal": "method.personal",
    "schedule": "schedule",
    "delays": "delays",
    "finetune": "eval.finetune",
}
"""What may be passed from Python as a class or an object, and the key that it is recorded under."""
NAME = re.compile(r"\w[\w.+-]*")
NEUTRAL = ("tracking", "checkpoint", "executor", "workers", "loggers", "memory_gb")
"""Keys that change where and how fast a run goes, but no bit of its result."""
COUNTS = {
    "clients": MOST_CLIENTS,
    "local_steps": MOST_STEPS,
    "batch_size": math.inf,
    "updates": MOST_VISITS,
    "workers": MOST_WORKERS,
}
"""Whole numbers >= 1, and where they end."""
PRECISION_NAMES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}


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
    """The longest direction of a local step, whatever the objective (not of fine-tuning); a longer one is shortened to
    it. null is none."""
    on_divergence: Literal["stop", "skip"] = "stop"
    """What an update that is not finite does: `stop` ends the run with exit code 3, `skip` leaves it out and counts
    it."""
    horizon: float | None = 100.0
    """End of the run in simulated time; null where `updates` or a replayed file ends it. Setting `updates` alone makes
    it null."""
    updates: int | None = None
    """End of the run after so many client updates; with `horizon` too, whichever comes first."""
    seed: int = 0
    """Names every random stream."""
    accelerator: str = "cpu"
    """As in Lightning Fabric: `cpu`, `cuda`, `mps`, `auto`."""
    devices: int | tuple[int, ...] | str = 1
    """As in Lightning Fabric; one device."""
    precision: str = "32-true"
    """As in Lightning Fabric: `32-true`, `64-true`, `bf16-mixed`, `bf16-true`. With bfloat16, gradients differ in the
    second digit."""
    derivatives: Literal["auto", "autograd"] = "auto"
    """Hand-written kernels where the network is a plain sequence of known layers, else autograd; or `autograd`
    always."""
    executor: Literal["serial", "processes", "ray"] = "processes"
    """Who trains: this process, one process per worker, or the cluster that RAY_ADDRESS names, else a local one. All
    give the same bits."""
    workers: int | None = None
    """Workers that train at the same time; null is one per core."""
    memory_gb: float = 2.0
    """GB of what clients keep between visits that stay in RAM; the rest lies in a file without a name in the folder of
    checkpoints."""
    allow_code: bool = False
    """Let names such as `method.objective=package.module.Class`, `model.path` and `data.path` import code of yours; no
    file of conf/ can."""
    callbacks: tuple[str | dict[str, Any], ...] = ()
    """Callbacks by entry point or package.module.Class; with arguments, `{name: package.module.Class, patience: 3}`."""
    loggers: tuple[str | dict[str, Any], ...] = ()
    """Lightning's loggers beside MLflow: `csv`, `tensorboard`, an entry point or package.module.Class, as `{name: csv,
    save_dir: logs}`."""
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
        if not self.memory_gb >= 0:
            raise ConfigError(f"memory_gb must be >= 0; got {self.memory_gb!r}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be a whole number from 0 to 2^63 - 1; got {self.seed}")
        if self.horizon is None and self.updates is None and self.schedule["name"] != "replay":
            raise ConfigError("the run never ends: set horizon (simulated time), updates, or both")
        for name in ("callbacks", "loggers"):
            object.__setattr__(self, name, tuple(_described(name, value) for value in getattr(self, name)))

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
        """The same run around a model that was passed from Python: recorded, and told from others, by its class and
        `args`."""
        return dataclasses.replace(
            self,
            model={
                "name": "custom",
                "path": path,
                "args": dict(args),
                **{key: self.model[key] for key in keys(Buffers)},
            },
        )

    def with_data(self, path: str, brings_clients: bool) -> Config:
        """The same run on data that was passed from Python; its digest is part of the run's identity. Settings of the
        deal are kept."""
        kept = {key: self.data[key] for key in keys(CustomData) if key in self.data and key not in ("path", "args")}
        values = {"name": "custom", **coerced(CustomData, {**kept, "path": path}, "data")}
        return dataclasses.replace(self, data=values, clients=None if brings_clients else self.clients)

    def with_parts(self, **parts: Any) -> Config:
        """The same run with an objective, a rule, ... from Python: classes or objects, recorded by their class and
        field values."""
        config = self
        for name, part in parts.items():
            key = PARTS[name]
            choice, values, outside = record(key, part)
            group, _, field = key.partition(".")
            if group == "method":
                content = {**config.method, field: choice}
                owners = [cls for cls in owners_of("method", content, True) if cls is not resolve(key, choice, True)]
                kept = {known: content[known] for cls in owners for known in keys(cls) if known in content}
                whole = completed("method", {**kept, **values, "name": config.name}, True)
                changed: Any = {"method": typed_group("method", whole, True)}
            else:
                typed = typed_group(key, completed(key, {**values, "name": choice}, True), True)
                changed = {group: dataclasses.replace(config.eval, finetune=typed) if field else typed}
            config = dataclasses.replace(config, allow_code=config.allow_code or outside, **changed)
            if not isinstance(part, type) and not same(made := config.part(key), part):
                raise ConfigError(
                    f"{name}={shown(part)} is not what its fields say, which is {shown(made)}; a run is "
                    "recorded by them alone"
                )
        config.check_parts()
        return config

    def part(self, key: str) -> Any:
        """The object of a key that names a class."""
        if not key.startswith("method."):
            return self.build(key)
        cls = resolve(key, get(self.values, key), self.allow_code)
        return make(cls, {name: self.method[name] for name in keys(cls)}, "method")

    def listed(self, key: str) -> list[Any]:
        """The callbacks or the loggers, made anew."""
        return [make_listed(key, described, self.allow_code) for described in getattr(self, key)]

    def with_metrics(self, names: Mapping[str, str]) -> Config:
        """The same run with metrics that were passed from Python: recorded by their name and class or function."""
        listed = (*self.eval.metrics, *({"name": name, "metric": path} for name, path in names.items()))
        return dataclasses.replace(self, eval=dataclasses.replace(self.eval, metrics=listed))

    def metrics(self, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Metrics by name, made anew; those that were given from Python are there already."""
        described: Any = self.eval.metrics
        return {
            about["name"]: given[about["name"]] if about["name"] in given else make_metric(about, self.allow_code)
            for about in described
        }

    def metric_sign(self, name: str) -> int:
        """+1 if higher values of a metric are better, -1 if lower, 0 if that is not known before it is measured."""
        if name in self.eval.direction:
            return SIGNS[self.eval.direction[name]]
        described: Any = self.eval.metrics
        made = [make_metric(about, self.allow_code) for about in described if about["name"] == name]
        higher = getattr(made[0], "higher_is_better", None) if made else None
        return 0 if higher is None else 1 if higher else -1

    def plugins(self) -> list[str]:
        """What of the run comes from outside, with versions."""
        named = [
            (key, get(self.values, key if key.startswith("method.") else f"{key}.name"))
            for key in (*PARTS.values(), "data", "model")
        ]
        named += [(key, described["name"]) for key in ("callbacks", "loggers") for described in getattr(self, key)]
        named += [("eval.finetune", name) for name in self.eval.beside if is_class("eval.finetune", name)]
        named += [("eval.metrics", about.get("metric", about["name"])) for about in cast(Any, self.eval.metrics)]
        found = {source for key, name in named if (source := source_of(key, name, self.allow_code))}
        paths = [group["path"] for group in (self.model, self.data) if group["name"] == "custom"]
        return sorted(found | {source for path in paths if (source := source_of_path(path, self.allow_code))})

    def label(self) -> str:
        """A short name that tells this run from others: the method, what was set otherwise than by default, the
        seed."""
        chosen = {key: get(self.values, key)["name"] for key in GROUPS}
        usual = self._usual(chosen)
        skipped = (*NEUTRAL, "seed", "eval", "allow_code")
        changed = {
            key: value
            for key, value in self.flat().items()
            if key.split(".")[0] not in skipped
            and value is not None
            and (usual[key] != value if key in usual else ".args." in key)
        }
        settings = [
            f"{key.removesuffix('.name').removeprefix('method.').removeprefix('schedule.')}={value}"
            for key, value in changed.items()
        ]
        return " ".join(
            [self.name, *([] if chosen["data"] == "digits" else [chosen["data"]]), *settings, f"seed={self.seed}"]
        )[:250]

    def _usual(self, chosen: Mapping[str, str]) -> dict[str, Any]:
        """The values that the method and the data set have by themselves, and the defaults of what was chosen
        otherwise."""
        parts = {"allow_code": self.allow_code, **{f"method.{key}": self.method[key] for key in keys(Method)}}
        known = {key: choice for key, choice in chosen.items() if key in ("method", "data")}
        usual: dict[str, Any] = {}
        for asked in ({**chosen, **parts}, {**known, "allow_code": self.allow_code}):
            with contextlib.suppress(ConfigError):  # a method that is known by its parts has no file
                usual |= compose(asked).flat()
        return usual

    def flat(self) -> dict[str, Any]:
        """Dotted keys and values, as on the command line."""
        return dict(flatten(self.values))

    def yaml(self) -> str:
        return to_yaml(self.values)

    # -- objects that need neither torch nor data ---------------------------------------------------------------------

    def objective(self) -> Objective:
        found: Objective = self.part("method.objective")
        return found

    def sharing(self) -> Sharing:
        return construct(Sharing, {key: self.method[key] for key in keys(Sharing)}, "method")

    def personal(self) -> PersonalModel:
        found: PersonalModel = self.part("method.personal")
        return found

    def check_parts(self) -> None:
        """Refuse parts that mean nothing together."""
        self.sharing().check(self.local_steps, self.local)
        self.buffers()
        self.local.check(self.objective(), self.personal().keeps)

    def gradients_per_step(self) -> float:
        """Of a local step, on average: the objective's, and those of a personal model."""
        return self.objective().cost + self.personal().gradients(self.local_steps) / self.local_steps

    def buffers(self) -> Buffers:
        return construct(Buffers, {key: self.model[key] for key in keys(Buffers)}, "model")

    def rule(self, clients: int, timeline: Timeline) -> Rule:
        cls = resolve("method.rule", self.method["rule"], self.allow_code)
        values = {key: self.method[key] for key in keys(cls)}
        if values.get("buffer") == "auto":
            values["buffer"] = self._round(timeline)
        if values.get("buffer") == "cohort":
            values["buffer"] = self._cohort(timeline)
        rule: Rule = make(cls, values, "method")
        if isinstance(rule, ControlVariates | LatestUpdates):
            rule = dataclasses.replace(rule, clients=clients)
        if (sends := self.objective().sends) != rule.receives:
            sent, wanted = (", ".join(names) or "nothing" for names in (sends, rule.receives))
            raise ConfigError(
                f"method.objective={self.method['objective']} sends {sent} beside its update and "
                f"method.rule={self.method['rule']} wants {wanted}; "
                "scaffold and control_variates, and others of their kind, go together or not at all"
            )
        rule.check(timeline)
        return self.buffers().around(rule, clients)

    def _round(self, timeline: Timeline) -> int:
        """method.buffer=auto: the size of a round where there are rounds, also replayed ones; else 1."""
        if self.schedule["name"] in ("asynchronous", "drawn"):
            return 1
        try:
            return self._cohort(timeline)
        except ConfigError:
            return 1

    def _cohort(self, timeline: Timeline) -> int:
        """method.buffer=cohort: the size of a round, from the schedule or from a replayed file."""
        if self.schedule["name"] == "rounds":
            return int(self.schedule["cohort"])
        if self.method["rule"] == "control_variates" and self.schedule["name"] != "replay":
            raise ConfigError(
                f"scaffold needs whole rounds, without staleness; schedule={self.schedule['name']} has none: "
                "use schedule=rounds"
            )
        cohort = math.gcd(*timeline.reads.tolist())
        if self.schedule["name"] in ("asynchronous", "drawn") or cohort == 0 or timeline.staleness(cohort).any():
            raise ConfigError(
                f"method.buffer=cohort waits for whole rounds, but schedule={self.schedule['name']} has none here; "
                "set method.buffer to a number or use schedule=rounds"
            )
        return cohort

    def timeline(self, clients: int) -> Timeline:
        """The communication setup: the same for every method with the same schedule, delays, clients and seed, and with
        `delays.per_gradient` > 0 also the same number of gradients per local step."""
        delays, objective, schedule = self.build("delays"), self.objective(), self.build("schedule")
        if getattr(delays, "per_gradient", 0) > 0 and isinstance(objective, Moreau) and objective.inner_steps is None:
            raise ConfigError(
                f"delays.per_gradient={delays.per_gradient:g} needs the number of gradients per local step "
                "beforehand, and method.nu alone does not "
                "give it; set method.inner_steps, or delays.per_gradient=0"
            )
        setting = Setting(
            clients, self.local_steps, delays, self.seed, self.horizon, self.updates, self.gradients_per_step()
        )
        try:
            with exits_refused():
                timeline: Timeline = schedule.timeline(setting)
            if self.schedule["name"] not in SCHEDULES:
                if not isinstance(timeline, Timeline):
                    raise TimelineError(f"schedule={self.schedule['name']} must give a Timeline; got {shown(timeline)}")
                check_timeline(timeline, lambda index: f"schedule={self.schedule['name']}, job {index}")
        except (PersaflError, KeyboardInterrupt):
            raise
        except BaseException as error:
            users = [
                f"{key}={name}"
                for key in ("delays", "schedule")
                if (name := getattr(self, key)["name"]) not in GROUP_CLASSES[key]
            ]
            if not users:
                raise
            raise TimelineError(f"{' or '.join(users)} fails: {located(error)}") from error
        return timeline

    def beside(self, schedule: str, clients: int) -> Config:
        """The same config under another schedule with its default settings, for comparison."""
        content = load_choice(schedule, "schedule", conf_folders())
        take_defaults(content, "schedule")
        values = typed_group("schedule", completed("schedule", {**content, "name": schedule}, False), False)
        if "cohort" in values:
            values["cohort"] = min(values["cohort"], clients)
        return dataclasses.replace(self, schedule=values)

    def data_settings(self) -> Any:
        """What the data group describes; what would run code of a user's only if that is allowed."""
        if getattr(DATASETS.get(self.data["name"]), "runs_code", False) and not self.allow_code:
            raise ConfigError(
                f"data.path={self.data['path']} runs code from outside persafl_lit; pass allow_code=true if "
                "you trust it"
            )
        return self.build("data")

    def federation(self, data: Any = None) -> Federation:
        """The clients' data: the one that the config names, or `data` that was passed from Python, dealt as the config
        says."""
        if data is not None:
            adapted: Federation = self.build("data").adapted(data, self.clients, self.seed)
            return adapted
        found: Federation = self.data_settings().federation(self.clients, self.seed)
        return found

    def build(self, group: str) -> Any:
        """The object that a group's dict describes."""
        values = self.eval.finetune if group == "eval.finetune" else getattr(self, group)
        cls = resolve(group, values["name"], self.allow_code)
        return make(cls, {key: value for key, value in values.items() if key in keys(cls)}, group)


SECTIONS = {*GROUPS, *(key for key, hint in hints(Config).items() if dataclasses.is_dataclass(hint))}
"""Keys that hold keys."""


# -- composition ------------------------------------------------------------------------------------------------------


def compose(overrides: Iterable[str] | Mapping[str, Any] = (), conf: Sequence[str | Path] = ()) -> Config:
    """The classes' defaults, then conf/config.yaml, the choices and what they bring, an experiment's values, the
    overrides.

    `conf` are folders to search before ./conf and ours.
    """
    folders = [*map(Path, conf), *conf_folders()]
    asked = flat_overrides(overrides)
    allow_code = coerce(bool, asked.get("allow_code", False), "allow_code")
    ends_by_updates = asked.get("updates") is not None and "horizon" not in asked
    if (preset := asked.pop("experiment", None)) is not None:
        described = flat_keys(load_choice(coerce(str, preset, "experiment"), "experiment", folders), SECTIONS)
        asked = {**_only_settings(described, f"experiment={preset}"), **asked}
    explicit = set(asked)
    if ends_by_updates or (asked.get("updates") is not None and "horizon" not in explicit):
        asked["horizon"] = None

    values = dataclasses.asdict(Config())
    always = find("config.yaml", folders)
    usual = {key: get(values, key)["name"] for key in GROUPS} | _only_settings(
        flat_keys(load(always, "config"), SECTIONS), str(always)
    )
    with _in_file(always):
        for key, value in usual.items():
            if key not in GROUPS:
                put(values, key, value, SECTIONS)
    chosen: dict[str, Any] = {key: asked.pop(key) for key in GROUPS if key in asked}
    for key in ("data", "method", "schedule", "model", "delays", "eval.finetune"):
        name = coerce(str, chosen.get(key, usual[key]), key)
        file, content = _chosen(key, name, asked, folders)
        with _in_file(file):
            name = coerce(str, content.pop("class", name), f"{key}'s class") if key != "method" else name
            for other, default in _only_settings(take_defaults(content, key), f"{key}={name}").items():
                if other in GROUPS:
                    chosen.setdefault(other, default)
                elif other not in explicit:
                    put(values, other, default, SECTIONS)
            before: list[type] = []
            if key == "method":
                with contextlib.suppress(ConfigError):  # what is overridden need not be there
                    before = owners_of(key, content, allow_code)
                content |= {part: asked[f"method.{part}"] for part in keys(Method) if f"method.{part}" in asked}
            set_group(values, key, completed(key, {**content, "name": name}, allow_code, before))
    for key, value in asked.items():
        put(values, key, value, SECTIONS)
    for key in GROUPS:
        set_group(values, key, typed_group(key, get(values, key), allow_code))
    config = construct(Config, values, "")
    config.check_parts()
    return config


def flat_overrides(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Overrides under dotted keys."""
    return flat_keys(as_mapping(overrides), SECTIONS)


def _chosen(
    key: str, name: str, asked: Mapping[str, Any], folders: Sequence[Path]
) -> tuple[Path | None, dict[str, Any]]:
    """The file of a choice and what it holds. A class needs no file, and neither does a method whose parts are
    named."""
    file = find_choice(name, GROUPS[key], folders)
    if file is not None:
        return file, load(file, key)
    named = all(f"method.{part}" in asked for part in keys(Method)) and NAME.fullmatch(name)
    if named if key == "method" else is_class(key, name):
        return None, {}
    return None, load_choice(name, key, folders)


def _only_settings(values: dict[str, Any], where: str) -> dict[str, Any]:
    if "allow_code" in values:
        raise ConfigError(f"{where} sets allow_code; only the command line, a sweep's overrides or Python can")
    return values


@contextlib.contextmanager
def _in_file(path: Path | None) -> Iterator[None]:
    """Errors in here are about a file; that of a user is named."""
    try:
        yield
    except ConfigError as error:
        if path is None or our_conf() in path.parents:
            raise
        raise ConfigError(f"{path}: {error}") from error


def _described(key: str, value: Any) -> dict[str, Any]:
    """A callback or a logger: its name, and its arguments."""
    described = {"name": value} if isinstance(value, str) else dict(value)
    if not isinstance(described.get("name"), str):
        raise ConfigError(
            f"{key} is a list of names such as package.module.Class, or of {{name: package.module.Class, "
            f"...}}; got {shown(value)}"
        )
    return described


def without(values: Mapping[str, Any], path: Sequence[str], usual: Any) -> dict[str, Any]:
    """The values without the key at `path`, if it is there and has this value, and without a section that is left
    empty."""
    first, *rest = path
    if first not in values or (not rest and values[first] != usual):
        return dict(values)
    left = {key: value for key, value in values.items() if key != first}
    inside = without(values[first], rest, usual) if rest else {}
    return {**left, first: inside} if inside else left
