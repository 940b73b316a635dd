"""The config grammar: every file works, overrides win, mistakes get one sentence."""

from __future__ import annotations

import dataclasses

import pytest

from persafl_lit import compose
from persafl_lit.config.coerce import construct
from persafl_lit.config.compose import GROUPS, choices, conf_folders
from persafl_lit.data import DATASETS
from persafl_lit.errors import ConfigError
from persafl_lit.learning.objectives import OBJECTIVES
from persafl_lit.learning.personalisation import FINETUNES
from persafl_lit.models.networks import MODELS
from persafl_lit.server import RULES
from persafl_lit.timeline import DELAYS, SCHEDULES

TABLES = {"data": DATASETS, "model": MODELS, "schedule": SCHEDULES, "delays": DELAYS, "eval.finetune": FINETUNES}
EVERY_CHOICE = [(key, name) for key, folder in GROUPS.items() for name in choices(folder)]
NEEDED = {
    ("schedule", "replay"): ["schedule.path=timeline.csv"],
    ("delays", "trace"): ["delays.path=trace.csv"],
    ("model", "custom"): ["model.path=package.module.Class"],
    ("data", "custom"): ["data.path=package.module.function"],
    ("data", "arrays"): ["data.path=x.npz"],
    ("data", "folder"): ["data.root=images"],
    ("data", "leaf"): ["data.root=femnist"],
}


@pytest.mark.parametrize(("key", "name"), EVERY_CHOICE)
def test_every_file_in_conf_is_instantiated(key, name, tmp_path):
    (tmp_path / "trace.csv").write_text("client,download,compute,upload,idle\n0,1,0,4,1\n")
    config = compose([f"{key}={name}", *NEEDED.get((key, name), [])])
    if key == "method":
        assert isinstance(config.objective(), OBJECTIVES[config.method["objective"]])
        timeline = config.timeline(30)
        assert isinstance(config.rule(30, timeline), RULES[config.method["rule"]])
    else:
        made = config.build(key)
        assert isinstance(made, TABLES[key][name])
        fields = {field.name for field in dataclasses.fields(made) if field.init}
        values = config.eval.finetune if key == "eval.finetune" else getattr(config, key)
        policy = {"buffers", "buffers_mix"} if key == "model" else set()  # which every model has
        assert fields | policy == set(values) - {"name"}, "the file names every setting of its class"


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_experiment_composes(name):
    assert compose([f"experiment={name}"]).hash()


def test_every_entry_of_every_table_has_a_file_and_the_other_way_round():
    for key, table in TABLES.items():
        assert set(table) == set(choices(GROUPS[key]))


def test_every_file_begins_with_one_line_about_itself():
    for folder in [*GROUPS.values(), "experiment"]:
        for name, line in choices(folder).items():
            assert len(line) > 15, (folder, name)


def test_the_papers_numbers_are_the_defaults():
    config = compose()
    assert (config.clients, config.local_steps, config.eta) == (30, 10, 0.01)
    assert config.method["lam"] == 25.0
    assert config.method["inner_steps"] == 10
    assert compose(["method=persafl_maml"]).method["hvp"] == "exact"


# -- grammar ----------------------------------------------------------------------------------------------------------


def test_a_method_brings_its_schedule_and_the_user_may_say_otherwise():
    assert compose(["method=fedavg"]).schedule["name"] == "rounds"
    assert compose(["method=persafl_me"]).schedule["name"] == "asynchronous"
    assert compose(["schedule=drawn", "method=fedasync"]).schedule["name"] == "drawn"
    assert compose(["data=quadratic"]).model["name"] == "point"


def test_order_does_not_matter_and_the_last_word_on_a_key_wins():
    one = compose(["method.lam=20", "method=persafl_me", "eta=0.1", "eta=0.2"])
    assert one.method["lam"] == 20.0
    assert one.eta == 0.2


def test_updates_replace_the_default_horizon_but_not_one_that_was_asked_for():
    assert compose(["updates=50"]).horizon is None
    both = compose(["updates=50", "horizon=10"])
    assert (both.updates, both.horizon) == (50, 10.0)
    assert compose(["schedule=replay", "schedule.path=x.csv"]).horizon is None


def test_values_are_typed():
    config = compose(
        [
            "method=persafl_me",
            "method.lam=20",
            "eta=1e-3",
            "clients=5",
            "model.channels=[4,8]",
            "precision=64",
            "schedule.tau=null",
        ]
    )
    assert config.eta == 0.001
    assert isinstance(config.method["lam"], int | float)
    assert config.values["method"]["lam"] == 20.0
    assert isinstance(config.values["method"]["lam"], float)
    assert config.precision == "64-true"
    assert config.build("model").channels == (4, 8)
    assert config.build("schedule").tau is None


def test_a_dict_a_nested_dict_and_a_resolved_config_say_the_same_as_a_list():
    listed = compose(["method=persafl_me", "method.lam=20", "clients=5", "eval.finetune=prox", "eval.finetune.lam=7"])
    flat = compose(
        {"method": "persafl_me", "method.lam": 20, "clients": 5, "eval.finetune": "prox", "eval.finetune.lam": 7}
    )
    nested = compose(
        {"method": {"name": "persafl_me", "lam": 20}, "clients": 5, "eval": {"finetune": {"name": "prox", "lam": 7}}}
    )
    assert listed.values == flat.values == nested.values == compose(listed.values).values


def test_the_hash_names_the_result_and_nothing_else():
    base = compose(["method.lam=20"])
    assert base.hash() == compose(["method.lam=20.0"]).hash()
    assert (
        compose(["delays.download=[1,2]", "model.dropout=0"]).hash()
        == compose(["delays.download=[1.0,2.0]", "model.dropout=0.0"]).hash()
    )
    for same in ("tracking.experiment=x", "checkpoint.every=7", "tracking.enabled=false"):
        assert compose(["method.lam=20", same]).hash() == base.hash()
    for other in ("method.lam=21", "seed=1", "eta=0.02", "eval.every=3", "method=pfedme"):
        assert compose(["method.lam=20", other]).hash() != base.hash()


def test_an_experiment_is_overridden_by_the_command_line():
    assert compose(["experiment=schedule_figure"]).clients == 5
    assert compose(["experiment=schedule_figure", "clients=7"]).clients == 7
    assert compose(["clients=7", "experiment=schedule_figure"]).clients == 7


def test_cells_off_the_method_table_have_the_keys_of_their_objective():
    config = compose(["method=fedbuff", "method.objective=maml", "method.alpha=0.5"])
    assert config.objective() == OBJECTIVES["maml"](alpha=0.5)
    assert config.method["buffer"] == 5


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["metod=fedavg"], "unknown key 'metod'; there are method, data, .*Did you mean 'method'"),
        (["method=fedavgg"], "unknown method 'fedavgg'; conf/method has .*fedasync, .*Did you mean 'fedavg'"),
        (["method=../data/digits"], "unknown method"),
        (["method=[1]"], "unknown method"),
        (["method.lamb=3"], "unknown key 'method.lamb'; method=persafl_me has .*Did you mean 'method.lam'"),
        (["method=fedasync", "method.lam=3"], "unknown key 'method.lam'; method=fedasync has"),
        (["method.objective=mamml"], "unknown method.objective 'mamml'.*Did you mean 'maml'"),
        (["eval.finetune=proxx"], "unknown eval.finetune 'proxx'; conf/finetune has"),
        (["eval.evry=3"], "unknown key 'eval.evry'; eval has every, finetune.*Did you mean 'eval.every'"),
        (["a.b.c=1"], "unknown key 'a.b.c'"),
        (["eta.x=1"], "unknown key 'eta.x'"),
        (["eta"], "'eta' is not an override"),
        (["=3"], "is not an override"),
        (["eta=abc"], "eta must be a finite number; got 'abc'"),
        (["eta=nan"], "eta must be a finite number"),
        (["eta=true"], "eta must be a finite number; got True"),
        (["eta=0"], "eta must be > 0"),
        (["eta=[1"], "eta: .* cannot be read as a value"),
        (["eta=${nothing}"], "eta: .* cannot be read as a value"),
        (["local_steps=-1"], "local_steps must be >= 1; got -1"),
        (["local_steps=1.5"], "local_steps must be a whole number; got 1.5"),
        (["clients=0"], "clients must be >= 1"),
        (["seed=-1"], "seed must be"),
        (["horizon=-5"], "horizon must be > 0"),
        (["horizon=null"], "the run never ends"),
        (["eval=3"], "eval is a group of keys"),
        (["eval.every=0"], "eval.every must be > 0"),
        (["checkpoint.every=-1"], "checkpoint.every must be >= 0"),
        (["method.name=x"], "write method=x"),
        (["executor=quantum"], "executor must be one of serial, processes, ray"),
        (["method.lam=25", "method.inner_lr=0.1"], "method.inner_lr=0.1 diverges with method.lam=25"),
        (["method=persafl_maml", "method.hvp=exakt"], "method.hvp must be one of .*Did you mean 'exact'"),
        (["experiment=nope"], "unknown experiment 'nope'"),
    ],
)
def test_a_mistake_gets_one_sentence(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        compose(overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "group", "sentence"),
    [
        (["model.dropout=abc"], "model", "model.dropout must be a finite number"),
        (["model.dropout=1.0"], "model", "model.dropout must lie in"),
        (["model.channels=[4]"], "model", "model.channels needs 2 values"),
        (["model.channels=[4,x]"], "model", "model.channels must be a whole number"),
        (["model=mlp", "model.hidden=[0]"], "model", "model.hidden must be >= 1"),
        (["delays.download=3"], "delays", "delays.download must be a range"),
        (["delays=trace"], "delays", "delays.path is missing; set delays.path="),
        (["schedule=replay"], "schedule", "schedule.path is missing"),
        (["schedule.tau=-1"], "schedule", "schedule.tau must be >= 0"),
        (["eval.finetune.steps=0"], "eval.finetune", "eval.finetune.steps must be > 0"),
    ],
)
def test_a_bad_value_in_a_group_is_refused_by_name(overrides, group, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compose(overrides).build(group)


def test_scaffold_needs_its_rule_and_the_rule_its_objective():
    config = compose(["method=scaffold", "method.objective=plain"])
    with pytest.raises(ConfigError, match="go together"):
        config.rule(30, config.timeline(30))


def test_a_single_string_is_not_a_list_of_overrides():
    with pytest.raises(ConfigError, match="got the string 'method=fedavg'"):
        compose("method=fedavg")


def test_an_unknown_key_of_a_class_is_refused():
    with pytest.raises(
        ConfigError, match=r"unknown key 'schedule.cohorts'; schedule has cohort. Did you mean 'cohort'"
    ):
        construct(SCHEDULES["rounds"], {"cohorts": 3}, "schedule")


def test_there_is_one_conf_folder():
    assert len(conf_folders()) == 1
