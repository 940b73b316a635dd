"""Every parser of something that a user hands in: success or one sentence, within seconds, and nothing is run or written elsewhere."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pytest
from hypothesis import strategies as st

from persafl_lit import compose
from persafl_lit.cli import main
from persafl_lit.common import limits
from persafl_lit.config.compose import choices, conf_folders
from persafl_lit.data import DATASETS
from persafl_lit.errors import ConfigError, PersaflError, TimelineError
from persafl_lit.learning.personalisation import FINETUNES
from persafl_lit.models.backbone import build_backbone
from persafl_lit.models.networks import MODELS
from persafl_lit.timeline import DELAYS, SCHEDULES
from tests.faults.hostile import (
    CANARY,
    CHOICES,
    KEYS,
    NEAR,
    NUMBERS,
    PLAIN,
    SIZES,
    TEXTS,
    TREES,
    check_sentence,
    each,
    files_under,
    lawful,
    str_of,
)

TABLES = {"data": DATASETS, "model": MODELS, "schedule": SCHEDULES, "delays": DELAYS, "eval.finetune": FINETUNES}


@pytest.fixture
def few_visits(monkeypatch):
    """The law is that work ends at the limit, wherever the limit is: a low one makes many cases quick."""
    monkeypatch.setattr(limits, "MOST_VISITS", 1000)


# -- configs ----------------------------------------------------------------------------------------------------------


def composed(overrides):
    config = compose(overrides)
    assert config.hash() == compose(config.values).hash(), "what was understood means the same when it is said again"
    text = json.dumps(config.values)
    assert "${" not in text
    assert CANARY not in text
    config.yaml()
    config.label()
    return config


@SIZES
def test_any_list_of_overrides_is_a_config_or_a_sentence(cases, tmp_path):
    chosen = st.sampled_from([(key, name) for key, names in CHOICES.items() for name in names])
    override = st.one_of(st.tuples(NEAR, TEXTS), st.tuples(st.sampled_from(KEYS), NUMBERS.map(str_of)), chosen).map(
        "=".join
    )
    each(
        cases, st.lists(st.one_of(override, TEXTS), min_size=1, max_size=4), lambda case: lawful(lambda: composed(case))
    )
    assert not files_under(tmp_path)


@SIZES
def test_any_dict_is_a_config_or_a_sentence(cases, tmp_path):
    odd = st.sampled_from(
        [
            object(),
            b"x",
            {1, 2},
            {1: 2},
            (1, 2),
            10**5000,
            np.arange(3),
            np.float64("nan"),
            print,
            type,
            tmp_path,
            "loop",
            1j,
        ]
    )
    each(
        cases,
        st.dictionaries(st.one_of(NEAR, st.integers(), st.none()), st.one_of(TREES, odd), max_size=3),
        lambda case: lawful(
            lambda: composed(
                {key: looped() if isinstance(value, str) and value == "loop" else value for key, value in case.items()}
            )
        ),
    )
    assert not files_under(tmp_path)


def looped():
    knot = []
    knot.append(knot)
    return knot


@SIZES
def test_any_conf_folder_is_read_as_data(cases, tmp_path):
    """A file of conf/ is replaced by something else."""
    (ours,) = conf_folders()
    folder = tmp_path / "conf"
    for path in ours.rglob("*.yaml"):
        (folder / path.relative_to(ours)).parent.mkdir(parents=True, exist_ok=True)
        (folder / path.relative_to(ours)).write_bytes(path.read_bytes())
    before = files_under(tmp_path)
    lines = st.lists(
        st.tuples(st.sampled_from([*KEYS, "defaults", "path", "tau", "objective", "beta"]), TEXTS).map(": ".join),
        max_size=4,
    ).map("\n".join)
    content = st.one_of(lines, TEXTS).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=40)

    def law(case):
        name, data = case
        original = (ours / name).read_bytes()
        try:
            (folder / name).write_bytes(data)
            group, _, file = name.rpartition("/")
            lawful(
                lambda: composed_from([f"{group}={file.removesuffix('.yaml')}"] if group in CHOICES else [], [folder])
            )
        finally:
            (folder / name).write_bytes(original)

    each(
        cases,
        st.tuples(
            st.sampled_from(["config.yaml", "method/fedasync.yaml", "data/digits.yaml", "schedule/rounds.yaml"]),
            content,
        ),
        law,
    )
    assert files_under(tmp_path) == before


def composed_from(overrides, folders):
    return compose(overrides, conf=folders).hash()


@pytest.mark.parametrize(
    "text", ["${oc.env:PERSAFL_CANARY}", "a${x}", "!!python/name:os.system", "&a b", "[&a [1], *a]", "!x y"]
)
def test_interpolations_tags_and_aliases_are_refused_everywhere(text, tmp_path):
    with pytest.raises(ConfigError, match="never filled in|are not read"):
        compose([f"tracking.experiment={text}"])
    with pytest.raises(ConfigError, match="never filled in|are not read"):
        compose([f"eta={text}"])
    if "${" in text:
        with pytest.raises(ConfigError, match="never filled in"):
            compose({"data": {"name": "mnist", "root": text}})


@pytest.mark.parametrize("name", ["2024_10", "1e3", "yes", "0x10", "1:30", "2024-01-01", "[x", "a: b", "007"])
def test_a_text_stays_as_it_is_written(name):
    assert compose([f"tracking.experiment={name}"]).tracking.experiment == name
    assert compose(["data=mnist", f"data.root={name}"]).data["root"] == name


def test_equal_settings_have_equal_hashes():
    def same(one, other, *rest):
        return compose([one, *rest]).hash() == compose([other, *rest]).hash()

    assert same("schedule.tau=3.0", "schedule.tau=3")
    assert same("schedule.cohort=5.0", "schedule.cohort=5", "method=fedavg")
    assert same("method.inner_steps=7.0", "method.inner_steps=7")
    assert same("data.classes_per_client=2.0", "data.classes_per_client=2")
    assert same("model.hidden=[32.0]", "model.hidden=32")
    assert same("delays.compute=-0.0", "delays.compute=0")
    assert same("eval.finetune.lr=1", "eval.finetune.lr=1.0")
    assert not same("schedule.tau=3", "schedule.tau=4")


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("clients=1000000000000", "at most 1,000,000"),
        ("updates=1000000000000000", "at most 2,000,000"),
        ("local_steps=1000000000", "at most 100,000"),
        ("workers=100000", "at most 1,024"),
        ("horizon=1e300", "numbers end at 1e"),
        ("method.inner_steps=1000000000", "at most 100,000"),
        ("tracking.patience=1e17", "at most 1,000,000"),
    ],
)
def test_a_limit_is_told(override, limit):
    with pytest.raises(ConfigError, match=limit):
        compose([override])


# -- what a config describes ------------------------------------------------------------------------------------------


@SIZES
def test_what_a_config_describes_is_built_or_refused(cases):
    """Every class that a config can name, with values of any size."""
    keys = st.sampled_from(
        [key for key in KEYS if key.split(".")[0] in ("data", "model", "schedule", "delays", "eval")]
    )
    value = st.one_of(
        NUMBERS.filter(lambda number: number != 10**400),
        PLAIN,
        st.lists(NUMBERS.filter(lambda number: number != 10**400), max_size=3),
    )

    def law(case):
        chosen, settings = case
        config = lawful(lambda: compose({**chosen, **settings}))
        for group, table in TABLES.items() if config else ():
            made = lawful(lambda group=group, table=table: config.build(group))
            if made is not None and hasattr(made, "network"):
                network = lawful(lambda made=made: made.network((1, 8, 8), 10))
                assert (
                    network is None
                    or sum(weights.numel() for weights in network.parameters()) <= 2 * limits.MOST_WEIGHTS
                )

    chosen = st.fixed_dictionaries(
        {},
        optional={
            key: st.sampled_from(CHOICES[key]) for key in ("data", "model", "schedule", "delays", "eval.finetune")
        },
    )
    each(cases, st.tuples(chosen, st.dictionaries(keys, value, max_size=2)), law)


@SIZES
def test_every_timeline_ends(cases, few_visits):
    """However long the horizon, short the delays and many the updates: a timeline, or the limit."""
    size = st.one_of(st.sampled_from([0, 1e-300, 1e-12, 1e-3, 1.0, 1e3, 1e9, 1e17]), st.floats(0, 1e18))
    settings = st.fixed_dictionaries(
        {
            "clients": st.sampled_from([1, 3, 40]),
            "schedule": st.sampled_from(["asynchronous", "rounds", "drawn"]),
            "horizon": st.one_of(st.none(), size),
        },
        optional={
            "updates": st.sampled_from([1, 5, 1000, 10**6, 10**15]),
            "delays": st.sampled_from([name for name in CHOICES["delays"] if name != "trace"]),
            "delays.download": st.tuples(size, size).map(sorted),
            "delays.upload_ratio": st.tuples(size, size).map(sorted),
            "delays.compute": size,
            "delays.idle": size,
            "local_steps": st.sampled_from([1, 10**5]),
        },
    )
    bound = st.fixed_dictionaries(
        {
            "schedule.tau": st.sampled_from([0, 1, 3, 10**9]),
            "schedule.policy": st.sampled_from(["wait", "drop", "measure"]),
        }
    )

    def law(case):
        settings, bound = case
        settings = (
            settings | bound
            if settings["schedule"] == "asynchronous"
            else settings | ({"schedule.cohort": 1} if settings["schedule"] == "rounds" else {})
        )
        config = lawful(lambda: compose(settings))
        timeline = config and lawful(lambda: config.timeline(config.clients))
        if timeline is not None:
            assert len(timeline) <= 1000 or (config.updates is not None and len(timeline) <= 4000)
            assert np.isfinite(timeline.arrives).all()
            timeline.summary()

    each(cases, st.tuples(settings, bound), law)


def test_the_real_limit_is_reached_in_seconds():
    for overrides in (
        ["horizon=1e17"],
        ["horizon=1e17", "schedule=drawn"],
        ["updates=1000", "delays.download=[1e-12,1e-12]", "horizon=1e9"],
    ):
        start = time.monotonic()
        lawful(lambda overrides=overrides: compose(overrides).timeline(30))
        assert time.monotonic() - start < 30


@pytest.mark.parametrize("idle", ["0", "1e-12"])
def test_a_trace_of_nothing_under_a_long_horizon_is_refused(idle, tmp_path):
    (tmp_path / "t.csv").write_text(f"client,download,compute,upload,idle\n0,1e-12,0,0,{idle}\n")
    with pytest.raises(TimelineError, match="more than 2,000,000 visits"):
        compose(["delays=trace", "delays.path=t.csv", "horizon=1000"]).timeline(1)


def test_a_slow_client_does_not_make_quick_ones_go_round_for_ever(tmp_path):
    (tmp_path / "t.csv").write_text("client,download,compute,upload,idle\n0,0.001,0,0,0\n1,1e9,0,0,0\n")
    timeline = compose(["delays=trace", "delays.path=t.csv", "updates=50"]).timeline(2)
    assert len(timeline) == 50
    assert set(timeline.client.tolist()) == {0}


# -- code -------------------------------------------------------------------------------------------------------------

TARGETS = [
    "os.system",
    "builtins.exec",
    "builtins.eval",
    "subprocess.Popen",
    "shutil.rmtree",
    "pathlib.Path.touch",
    "os.mkdir",
    "torch.load",
    "x",
    "",
    ".",
    "..x",
]


@pytest.mark.parametrize("target", TARGETS)
def test_only_lightning_modules_are_ever_called_and_only_when_code_is_allowed(target, tmp_path):
    federation = compose(["clients=3"]).build("data").federation(3, 0)
    for allowed, args in ((False, {}), (True, {"command": "touch pwned"}), (True, {"path": "pwned"}), (True, {})):
        config = compose({"model": {"name": "custom", "path": target or None, "args": args}})
        with pytest.raises(
            PersaflError,
            match="allow_code=true|is missing" if not allowed else "no LightningModule class|cannot build|is missing",
        ) as error:
            build_backbone(config.build("model"), federation, 0, allowed)
        check_sentence(str(error.value))
    assert not files_under(tmp_path)


def test_without_allow_code_a_module_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text("open('pwned', 'w')\nclass Net: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["run", "model=custom", "model.path=own_code.Net", "tracking.enabled=false", "clients=3"]
    assert main(arguments) == 2
    assert "own_code" not in sys.modules
    assert not (tmp_path / "pwned").exists()
    assert main([*arguments, "allow_code=true"]) == 2, "the class is no LightningModule"
    assert (tmp_path / "pwned").exists(), "the module is one that tells when it is imported"


@pytest.mark.parametrize(
    "key", ["model._target_", "method._target_", "data._target_", "schedule.__class__", "_target_"]
)
def test_there_is_no_key_that_names_code(key):
    with pytest.raises(ConfigError, match="unknown key"):
        compose([f"{key}=os.system"])


def test_choices_are_names_of_files_and_no_paths():
    for group in CHOICES:
        for name in ("../config", "/etc/passwd", "sub/x", "..", "", "digits.yaml", "digits\0"):
            with pytest.raises(ConfigError, match="unknown|without control|runs code from outside"):
                compose({group: name})
    assert "digits" in choices("data")


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["run", "method=scaffold", "schedule=asynchronous"],
            "scaffold needs whole rounds, without staleness; schedule=asynchronous has none: use schedule=rounds",
        ),
        (
            ["run", "data.partition=dirichelt"],
            "data.partition must be one of classes, dirichlet, iid, natural; got 'dirichelt'. Did you mean 'dirichlet'?",
        ),
        (
            ["run", "data=quadratic", "data.path=note.txt"],
            "cannot read 'note.txt' as an npz of numbers: it is not an npz file at all",
        ),
        (["timeline", "data.holdout_clients=true"], "data.holdout_clients must be a whole number; got True"),
        (
            ["timeline", "data.holdout_clients=30"],
            "data.holdout_clients must lie between 0 and clients - 1 = 29; got 30",
        ),
        (
            ["run", "model=mlp", "model.hidden=[1000000000]"],
            "this network would have 74,000,000,000 weights or more, beyond the 100,000,000",
        ),
        (
            ["run", "data=quadratic", "data.dimension=1000000000"],
            "numbers, more than 100,000,000; lower data.dimension or clients",
        ),
        (["run", "eval.every=1e-300"], "makes more than 100000 evaluations"),
    ],
)
def test_a_mistake_says_what_would_do(arguments, sentence, capsys, tmp_path):
    (tmp_path / "note.txt").write_text("hello")
    assert main([*arguments, "tracking.enabled=false"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_whole_float_is_a_number_of_clients(capsys):
    assert main(["timeline", "clients=5", "data.holdout_clients=1.0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clients"] == 4
