"""The schema: dataclasses own every key's type, default and meaning; conf/ and docs/ say nothing that differs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from persafl_lit import compose
from persafl_lit.config.coerce import Written, coerce, construct, defaults, hints, keys
from persafl_lit.config.compose import GROUPS, SECTIONS, Config, choices, conf_folders
from persafl_lit.config.groups import GROUP_CLASSES
from persafl_lit.config.parse import flat_keys, load, load_choice
from persafl_lit.config.paths import flatten
from persafl_lit.config.reference import meanings, page, type_of
from persafl_lit.config.schema import Checkpoints, Eval, Method, Tracking
from persafl_lit.errors import ConfigError
from persafl_lit.learning.objectives import OBJECTIVES
from persafl_lit.learning.sharing import Sharing
from persafl_lit.server import RULES
from persafl_lit.server.rules import ControlVariates
from persafl_lit.timeline import SCHEDULES, Rounds

ROOT = Path(__file__).parent.parent.parent
CLASSES = {
    cls
    for table in (
        *GROUP_CLASSES.values(),
        OBJECTIVES,
        RULES,
        {"": Config, "eval": Eval, "checkpoint": Checkpoints, "tracking": Tracking, "method": Method},
    )
    for cls in table.values()
}
EVERY_CHOICE = [(key, name) for key, folder in GROUPS.items() for name in choices(folder)]


# -- one owner --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_every_key_has_a_meaning_in_one_line(cls):
    said = meanings(cls)
    for key in keys(cls):
        assert said.get(key, "").endswith("."), f"{cls.__name__}.{key} needs one line below it that says what it means"
        assert "\n" not in said[key]


@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_every_default_has_the_type_of_its_key(cls):
    for key, default in defaults(cls).items():
        if default is not None or type(None) in getattr(hints(cls)[key], "__args__", ()):
            typed = coerce(hints(cls)[key], default, key)
            assert (typed, type(typed)) == (default, type(default))


def test_the_page_of_keys_is_what_the_schema_says():
    command = "python -m persafl_lit.config.reference > docs/configuration.md"
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), f"run: {command}"


def test_the_page_has_every_key_of_every_config():
    text = page()
    for group, name in EVERY_CHOICE:
        for key in compose([f"{group}={name}"]).flat():
            assert f"| `{key.removesuffix('.name')}` |" in text


def test_a_new_key_is_one_field_and_nothing_else(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Paused(Rounds):
        pause: float | None = 1.0
        """Simulated time between rounds."""

    monkeypatch.setitem(SCHEDULES, "rounds", Paused)
    assert compose(["schedule=rounds"]).schedule == {"name": "rounds", "cohort": 10, "pause": 1.0}
    assert compose(["schedule=rounds", "schedule.pause=2"]).build("schedule") == Paused(pause=2.0)
    assert "| `schedule.pause` | rounds | number or null | `1.0` | Simulated time between rounds. |" in page()
    with pytest.raises(ConfigError, match="schedule.pause must be a finite number or null; got 'x'"):
        compose(["schedule=rounds", "schedule.pause=x"])


def test_settings_are_read_without_torch():
    code = """
import sys
from persafl_lit.config.compose import GROUPS, choices, compose
from persafl_lit.config.groups import GROUP_CLASSES
import persafl_lit.config.reference
needed = {"replay": ["schedule.path=x.csv"], "model custom": ["model.path=a.B"], "data custom": ["data.path=a.b"], "arrays": ["data.path=x.npz"]}
needed |= {"folder": ["data.root=x"], "leaf": ["data.root=x"]}
for key, folder in GROUPS.items():
    for name in choices(folder):
        config = compose([f"{key}={name}", *needed.get(name, []), *needed.get(f"{key} {name}", [])])
        config.objective()
        for group, table in GROUP_CLASSES.items():
            if config.values["delays"]["name"] != "trace":
                config.build(group)
for name in choices("experiment"):
    compose([f"experiment={name}"]).hash()
print(sorted({"torch", "lightning", "mlflow", "ray"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- YAML holds deviations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "name"), EVERY_CHOICE)
def test_a_file_of_conf_holds_only_what_differs_from_the_class(key, name):
    content = load_choice(name, key, conf_folders())
    content.pop("defaults", None)
    parts = {"objective": "plain", "rule": "descent"} | content
    owners = (
        [Method, OBJECTIVES[parts["objective"]], RULES[parts["rule"]], Sharing]
        if key == "method"
        else [GROUP_CLASSES[key][name]]
    )
    usual = {field: default for cls in owners for field, default in defaults(cls).items()}
    assert {field for field, value in content.items() if json.dumps(value) == json.dumps(usual[field])} == set()


def test_config_yaml_holds_only_what_differs_from_the_classes():
    usual = dict(flatten(dataclasses.asdict(Config())))
    content = flat_keys(load(conf_folders()[0] / "config.yaml", "config"), SECTIONS)
    assert {key for key, value in content.items() if usual.get(key, usual.get(f"{key}.name")) == value} == set()


@pytest.mark.parametrize("name", choices("experiment"))
def test_an_experiment_holds_choices_and_what_differs_from_them(name):
    content = load_choice(name, "experiment", conf_folders())
    usual = compose({key: value for key, value in content.items() if key in GROUPS}).flat()
    assert {key for key, value in content.items() if key not in GROUPS and usual[key] == value} == set()


def test_the_papers_experiments_have_the_papers_numbers():
    for name, classes, network in (("paper_mnist", 5, [32, 64]), ("paper_cifar10", 3, [32, 64, 64])):
        config = compose([f"experiment={name}"])
        assert (config.clients, config.local_steps, config.eta, config.data["classes_per_client"]) == (
            30,
            10,
            0.01,
            classes,
        )
        assert config.values["model"]["channels"] == network
        assert config.values["delays"]["upload_ratio"] == [4.0, 6.0]


@pytest.mark.parametrize(
    ("file", "line", "sentence"),
    [
        (
            "method/fedasync.yaml",
            "lamb: 3",
            "unknown key 'method.lamb'; method=fedasync has objective, .*Did you mean 'lam'",
        ),
        (
            "schedule/rounds.yaml",
            "cohorts: 3",
            "unknown key 'schedule.cohorts'; schedule=rounds has cohort. Did you mean 'cohort'",
        ),
        ("schedule/rounds.yaml", "cohort: x", "schedule.cohort must be a whole number; got 'x'"),
        ("schedule/rounds.yaml", "defaults: {etaa: 1}", "unknown key 'etaa'; there are method, .*Did you mean 'eta'"),
        ("config.yaml", "evall: {every: 3}", "unknown key 'evall'; there are method, .*Did you mean 'eval'"),
        ("config.yaml", "eval: {evry: 3}", "unknown key 'eval.evry'; eval has every, .*Did you mean 'eval.every'"),
    ],
)
def test_a_mistake_in_a_file_of_conf_is_refused_by_name(file, line, sentence, tmp_path):
    (ours,) = conf_folders()
    for path in ours.rglob("*.yaml"):
        (tmp_path / path.relative_to(ours)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path.relative_to(ours)).write_bytes(path.read_bytes())
    (tmp_path / file).write_text(f"# A file with a mistake\n{line}\n")
    with pytest.raises(ConfigError, match=sentence):
        compose(["schedule=rounds", "method=fedasync"], conf=[tmp_path])


# -- one place decides types ------------------------------------------------------------------------------------------


def written(text, value):
    return Written(text, value)


@pytest.mark.parametrize(
    ("hint", "value", "typed"),
    [
        (str, written("2024_10", 202410), "2024_10"),
        (str | None, written("1e5", 1e5), "1e5"),
        (int, written("2_0", 20), 20),
        (float, written("3", 3), 3.0),
        (Any, written("1e3", 1000.0), 1000.0),
        (tuple[int, ...], written("[1, 2.0]", [1, 2.0]), (1, 2)),
        (tuple[float, ...], written("5", 5), (5.0,)),
        (dict[str, Any], {"width": written("64", 64)}, {"width": 64}),
        (Literal["1", "2"], written("1", 1), "1"),
        (int | tuple[int, ...] | str, written("[0, 1]", [0, 1]), (0, 1)),
        (int | tuple[int, ...] | str, "auto", "auto"),
        (Annotated[int, Literal["cohort"]], "cohort", "cohort"),
        (Annotated[int, Literal["cohort"]], written("5.0", 5.0), 5),
    ],
)
def test_the_annotation_decides(hint, value, typed):
    found = coerce(hint, value, "key")
    assert (found, type(found)) == (typed, type(typed))


@pytest.mark.parametrize(
    ("hint", "value", "sentence"),
    [
        (int, Written("[x", problem="key: '[x' cannot be read"), "key: '\\[x' cannot be read"),
        (int | None, Written("[x", problem="key: '[x' cannot be read"), "key: '\\[x' cannot be read"),
        (str, Written(None, ["a", "b"]), "key must be a text; got \\['a', 'b'\\]"),
        (Annotated[int, Literal["cohort"]], "rounds", "key must be a whole number or cohort; got 'rounds'"),
        (
            int | tuple[int, ...] | str,
            written("true", True),
            "key must be a whole number or a list of whole numbers or a text; got True",
        ),
        (bool, 1, "key must be true or false; got 1"),
    ],
)
def test_what_no_type_takes_is_refused(hint, value, sentence):
    with pytest.raises(ConfigError, match=sentence):
        coerce(hint, value, "key")


@pytest.mark.parametrize("text", ["2024_10", "1e5", "007", "true", "[x", "a: b"])
def test_every_text_key_keeps_what_is_written(text):
    """Whichever class has it: nobody lists text keys."""
    seen = set()
    for group, name in EVERY_CHOICE:
        owners = {group: GROUP_CLASSES[group][name]} if group in GROUP_CLASSES else {}
        for where, cls in {**owners, "checkpoint": Checkpoints, "": Config}.items():
            for key in (key for key in keys(cls) if type_of(hints(cls)[key]) in ("text", "text or null")):
                full = f"{where}.{key}" if where else key
                seen.add(full)
                assert compose([f"{group}={name}", f"{full}={text}"]).flat()[full] == text
    assert {
        "data.root",
        "data.path",
        "delays.path",
        "schedule.path",
        "model.path",
        "accelerator",
        "precision",
        "checkpoint.dir",
    } <= seen


def test_a_field_that_the_program_fills_in_is_no_key():
    assert "clients" not in keys(ControlVariates)
    with pytest.raises(ConfigError, match="unknown key 'method.clients'"):
        compose(["method=scaffold", "method.clients=3"])
    with pytest.raises(ConfigError, match="unknown key 'method.clients'"):
        construct(ControlVariates, {"clients": 3}, "method")
    config = compose(["method=scaffold"])
    assert config.rule(12, config.timeline(12)).clients == 12


def test_arguments_of_a_model_may_be_given_whole_and_one_by_one():
    config = compose(
        ["model=custom", "model.path=a.B", "model.args={width: 3}", "model.args.depth=2", "model.args.rate=1e-3"]
    )
    assert config.model["args"] == {"width": 3, "depth": 2, "rate": 0.001}


def test_a_section_without_keys_is_refused():
    with pytest.raises(ConfigError, match="eval is a group of keys"):
        compose(["eval={}"])


# -- stored once ------------------------------------------------------------------------------------------------------


def test_the_values_of_a_config_are_its_fields():
    assert "values" not in {field.name for field in dataclasses.fields(Config)}
    config = compose(["clients=12", "schedule.tau=3"])
    other = dataclasses.replace(config, clients=7, schedule={**config.schedule, "tau": 4})
    assert (other.values["clients"], other.values["schedule"]["tau"]) == (7, 4)
    assert other.hash() == compose(["clients=7", "schedule.tau=4"]).hash() != config.hash()


def test_a_config_beside_another_is_the_config_of_that_schedule():
    config = compose(["clients=6", "schedule.tau=3"])
    rounds = config.beside("rounds", 6)
    assert rounds.schedule == rounds.values["schedule"] == {"name": "rounds", "cohort": 6}
    assert rounds.values == compose(["clients=6", "schedule=rounds", "schedule.cohort=6"]).values
    assert rounds.beside("asynchronous", 6).values == compose(["clients=6"]).values


def test_a_config_around_a_model_names_it_in_its_values():
    named = compose().with_model("package.Net", {})
    assert (
        named.values["model"]
        == named.model
        == {"name": "custom", "path": "package.Net", "args": {}, "buffers": "local", "buffers_mix": None}
    )
    assert compose(["model.buffers=shared"]).with_model("package.Net", {}).model["buffers"] == "shared"
    assert named.hash() != compose().hash()


HASHES_OF_0_1 = {
    "method=fedasync": "90c0bc85a1674f8c",
    "method=scaffold": "710c49f225e37dfe",
    "data=quadratic": "38f24965c3ad642b",
    "delays=pareto": "78cc98fa92ea0f81",
    "schedule=drawn": "dc9040d2cff6da25",
    "experiment=paper_mnist": "bb1d82ff8f3be8a9",
}


@pytest.mark.parametrize("override", HASHES_OF_0_1)
def test_a_config_has_the_hash_that_it_had_in_0_1(override):
    """So finished trials of a sweep stay finished; a key that came later counts once it is not at its default."""
    assert compose([override]).hash() == HASHES_OF_0_1[override]
    for changed in ("derivatives=autograd", "method.private=head"):
        assert compose([override, changed]).hash() != HASHES_OF_0_1[override]
