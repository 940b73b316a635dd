"""Methods, rules, delays, schedules, fine-tuning rules, callbacks and loggers of a user's, without a fork."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import persafl_lit
from persafl_lit import (
    Delays,
    Descent,
    Finetune,
    Maml,
    Objective,
    Plain,
    Proximal,
    Rule,
    Schedule,
    Timeline,
    compose,
    jobs_to_timeline,
    run,
)
from persafl_lit.cli import main
from persafl_lit.config.registry import TABLES, path_of, resolve
from persafl_lit.errors import ConfigError, ModelError, PersaflError, TimelineError

ROOT = Path(__file__).parent.parent.parent
SMALL = ["clients=4", "updates=12", "local_steps=2", "data=quadratic", "tracking.enabled=false", "executor=serial"]
OWN = ["method=fedasync", "method.objective=my_parts.Gentle", "allow_code=true"]
MODULE = '''
    """A module of the user's."""
    from dataclasses import dataclass
    from persafl_lit import Callback, Delays, Descent, Finetune, Objective, Schedule, jobs_to_timeline
    import numpy as np


    @dataclass(frozen=True)
    class Gentle(Objective):
        """A pull towards the model that was read."""

        strength: float = 0.1
        """How strong it is."""

        def gradient(self, f, step):
            return f.gradient(step.w, step.batches[0]).add_(step.w - step.read, alpha=self.strength)


    @dataclass(frozen=True)
    class Halving(Descent):
        """Half of every update."""

        share: float = 0.5

        def apply(self, state, read, sent, staleness):
            super().apply(state, read, {"delta": self.share * sent["delta"]}, staleness)


    @dataclass(frozen=True)
    class Slow(Delays):
        """Later clients are slower."""

        each: float = 1.0

        def visit(self, seed, client, visit, local_steps, gradients):
            return 1 + self.each * client, 0, 2, 0.5


    @dataclass(frozen=True)
    class OneByOne(Schedule):
        """A client a second, in turn."""

        pause: float = 1.0

        def timeline(self, setting):
            count = setting.updates
            index = np.arange(count)
            return jobs_to_timeline(setting.clients, index % setting.clients, index, index * self.pause, (index + 1) * self.pause, count * self.pause)


    @dataclass(frozen=True)
    class Zero(Finetune):
        """The zero model."""

        def personalise(self, client, w, batches, whole):
            return 0 * w


    class Stop(Callback):
        def __init__(self, after=0):
            self.after = after

        def on_evaluation(self, experiment, point):
            if point.updates >= self.after:
                experiment.stop(point)


    def function():
        pass


    class Quits(Gentle):
        def gradient(self, f, step):
            import os
            os._exit(0)
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module in the current folder, as `persafl` finds it: the folder is not on sys.path before."""
    (tmp_path / "my_parts.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("my_parts", None)


def package(folder, name, groups, **files):
    """An installed package, as importlib.metadata sees one: a module and the metadata beside it."""
    entries = "".join(
        f"[persafl_lit.{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
        for group, names in groups.items()
    )
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entries)
    for file, text in files.items():
        path = folder / file.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".yaml" if "conf" in path.parts else ".py").write_text(textwrap.dedent(text))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# -- dotted paths -----------------------------------------------------------------------------------------------------


def test_fields_of_a_users_dataclass_are_keys(own):
    config = compose([*OWN, "method.strength=3"])
    assert config.method["strength"] == 3.0
    assert config.objective().strength == 3.0
    assert compose(OWN).method["strength"] == 0.1
    assert "objective=my_parts.Gentle strength=3.0" in config.label()
    with pytest.raises(ConfigError, match="method.strength must be a finite number; got 'x'"):
        compose([*OWN, "method.strength=x"])
    with pytest.raises(
        ConfigError, match="unknown key 'method.strenth'; method=fedasync has .*Did you mean 'method.strength'"
    ):
        compose([*OWN, "method.strenth=1"])


def test_path_and_values_are_in_the_hash(own):
    plain, mine = compose(["method=fedasync", "allow_code=true"]), compose(OWN)
    assert len({plain.hash(), mine.hash(), compose([*OWN, "method.strength=0.2"]).hash()}) == 3
    assert compose([*OWN, "method.strength=0.1"]).hash() == mine.hash() == compose(mine.values).hash()


def test_a_users_proximal_objective_has_the_bits_of_ours(own):
    mine = run([*SMALL, *OWN, "method.strength=0.3"])
    ours = run([*SMALL, "method=fedasync", "method.objective=proximal", "method.mu=0.3"])
    assert torch.equal(mine.model.w, ours.model.w)


def test_every_part_may_be_a_users(own):
    overrides = [
        *SMALL,
        "method.objective=my_parts.Gentle",
        "method.rule=my_parts.Halving",
        "method.share=0.25",
        "method.beta=2",
        "schedule=my_parts.OneByOne",
        "schedule.pause=2",
        "eval.finetune=my_parts.Zero",
        "eval.beside=[own, none]",
        "eval.every=4",
        "callbacks=[{name: my_parts.Stop, after: 6}]",
        "allow_code=true",
    ]
    result = run(overrides)
    config = result.config
    assert config.rule(4, result.timeline).share == 0.25
    assert config.schedule == {"name": "my_parts.OneByOne", "pause": 2.0}
    assert result.timeline.arrives.tolist()[:3] == [2.0, 4.0, 6.0]
    assert 6 <= result.summary()["updates"] < 12, "the callback has ended it"
    ours = run(
        [
            *SMALL,
            "method.objective=proximal",
            "method.mu=0.1",
            "method.beta=0.5",
            "schedule=my_parts.OneByOne",
            "schedule.pause=2",
            *overrides[-3:],
        ]
    )
    assert torch.equal(result.model.w, ours.model.w), "a quarter of a doubled step"
    delayed = compose([*SMALL, "delays=my_parts.Slow", "delays.each=0", "allow_code=true"])
    assert delayed.timeline(4).arrives.tolist()[:5] == [3.0] * 4 + [6.5]


def test_a_resolved_config_composes_to_itself_without_the_files_it_was_made_of(own):
    (own / "conf" / "method").mkdir(parents=True)
    (own / "conf" / "delays").mkdir()
    (own / "conf" / "method" / "mine.yaml").write_text(
        "# Mine\nobjective: my_parts.Gentle\nstrength: 0.7\ndefaults: {schedule: rounds}\n"
    )
    (own / "conf" / "delays" / "mobile.yaml").write_text("# Phones\nclass: lognormal\nsigma: 1.5\n")
    config = compose(["method=mine", "delays=mobile", "allow_code=true"])
    assert (config.name, config.method["strength"], config.schedule["name"]) == ("mine", 0.7, "rounds")
    assert (config.delays["name"], config.delays["sigma"]) == ("lognormal", 1.5)
    assert compose(["method=mine", "allow_code=true", "method.objective=plain"]).objective() == Plain()
    os.rename(own / "conf", own / "elsewhere")
    again = compose(config.values)
    assert again.values == config.values
    assert again.label().startswith("mine schedule=rounds") or again.label().startswith("mine")
    assert (
        compose(["method=mine", "allow_code=true"], conf=["elsewhere"]).hash()
        == compose(["method=mine", "allow_code=true"], conf=[own / "elsewhere"]).hash()
    )
    with pytest.raises(ConfigError, match="unknown method 'mine'"):
        compose(["method=mine", "allow_code=true"])


def test_an_own_folder_comes_before_ours_and_says_so(own, capsys):
    for folder, beta in (("conf", 0.5), ("asked", 0.25)):
        (own / folder / "method").mkdir(parents=True)
        (own / folder / "method" / "fedasync.yaml").write_text(f"# Ours, slower\nbeta: {beta}\n")
    assert compose(["method=fedasync"]).method["beta"] == 0.5
    assert main(["timeline", "method=fedasync", "clients=3", "horizon=20", "--conf", "asked"]) == 0
    capsys.readouterr()
    assert main(["list", "--conf", "asked"]) == 0
    assert f"Ours, slower  (folder {own / 'asked'})" in capsys.readouterr().out
    assert compose(["method=fedasync"]).method["beta"] == 0.5, "--conf ends with its command"
    assert main(["run", "--conf", "nowhere"]) == 2
    assert "there is no conf folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", "allow_code: true\n"),
        ("experiment/mine.yaml", "allow_code: true\n"),
        ("method/mine.yaml", "defaults: {allow_code: true}\nobjective: my_parts.Gentle\n"),
    ],
)
def test_no_file_of_conf_can_allow_code(own, file, content):
    (own / "conf" / file).parent.mkdir(parents=True, exist_ok=True)
    (own / "conf" / file).write_text(content)
    chosen = file.removesuffix(".yaml").replace("/", "=")
    with pytest.raises(ConfigError, match="sets allow_code; only the command line"):
        compose([chosen] if "=" in chosen else [])
    assert "my_parts" not in sys.modules


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["method.objective=my_parts.Gentle"],
            "method.objective=my_parts.Gentle runs code from outside persafl_lit; pass allow_code=true",
        ),
        (["method.objective=nowhere.Gentle", "allow_code=true"], "is not there: there is no module 'nowhere'"),
        (
            ["method.objective=json.nowhere.Gentle", "allow_code=true"],
            "is not there: the package json has no module or class 'nowhere'",
        ),
        (
            ["method.objective=my_parts.Gentel", "allow_code=true"],
            "the module my_parts has no 'Gentel'. Did you mean 'Gentle'",
        ),
        (["method.objective=my_parts.Gentle.x", "allow_code=true"], "the class my_parts.Gentle has no 'x'"),
        (
            ["method.objective=my_parts.Slow", "allow_code=true"],
            "is no objective: make Slow a subclass of persafl_lit.Objective",
        ),
        (["method.objective=my_parts.function", "allow_code=true"], "is no class but <function"),
        (["method.objective=persafl_lit.Objective", "allow_code=true"], "does not define gradient"),
        (["method.rule=my_parts.Gentle", "allow_code=true"], "is no rule: make Gentle a subclass of persafl_lit.Rule"),
        (["delays=my_parts.Gentle", "allow_code=true"], "is no delays: make Gentle a subclass of persafl_lit.Delays"),
        (["schedule=my_parts.Gentle", "allow_code=true"], "make Gentle a subclass of persafl_lit.Schedule"),
        (["eval.finetune=my_parts.Gentle", "allow_code=true"], "make Gentle a subclass of persafl_lit.Finetune"),
        (["data=my_parts.Gentle", "allow_code=true"], "is no data: Gentle needs federation"),
        (["model=my_parts.Gentle", "allow_code=true"], "is no model: Gentle needs network"),
        (["delays=../my_parts"], "unknown delays '../my_parts'; conf/delays has constant"),
        (["method=my_parts.Gentle", "allow_code=true"], "unknown method 'my_parts.Gentle'"),
        (["callbacks=[{after: 3}]"], "callbacks is a list of names such as package.module.Class"),
    ],
)
def test_a_mistake_gets_one_sentence_that_says_what_is_missing(own, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        compose(overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["callbacks=[my_parts.Stop]"], "callbacks=my_parts.Stop runs code from outside"),
        (["callbacks=[my_parts.Gentle]", "allow_code=true"], "is no callback: Gentle needs on_run_start or on_update"),
        (
            ["callbacks=[{name: my_parts.Stop, at: 3}]", "allow_code=true"],
            "callbacks: my_parts.Stop cannot be made with {'at': 3}: TypeError",
        ),
        (["callbacks=[nothing]"], "unknown callbacks 'nothing'; there are package.module.Class of yours"),
        (["loggers=[cvs]"], "unknown loggers 'cvs'; there are csv, tensorboard, .*Did you mean 'csv'"),
        (["eval.beside=[my_parts.Zero]"], "eval.beside=my_parts.Zero runs code from outside"),
    ],
)
def test_a_mistake_in_a_list_is_told_before_anything_runs(own, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run([*SMALL, *overrides])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("class Mine(Objective):\n    size: float = 1.0\n    gradient = None", r"put @dataclass\(frozen=True\) above Mine"),
        ("class Mine(Objective):\n    def __init__(self, size=1): pass\n    gradient = None", "put @dataclass"),
        ("@dataclass(frozen=True)\nclass Mine(Objective):\n    sizes: list[float] = ()\n    gradient = None", "Mine.sizes: no key can be a list"),
        ("@dataclass(frozen=True)\nclass Mine(Objective):\n    name: str = ''\n    gradient = None", "a key cannot be called name"),
        ("@dataclass(frozen=True)\nclass Mine(Objective):\n    size: 'Nothing' = 1\n    gradient = None", "types of Mine's fields cannot be read: NameError"),
        ("@dataclass(frozen=True)\nclass Mine(Objective):\n    size: float = 1\n    gradient = None\n    def __post_init__(self): raise ValueError('too small')", "Mine cannot be made of {'size': 1.0}: ValueError: too small"),
        ("import absent_library", "the module broken cannot be imported: ModuleNotFoundError: No module named 'absent_library' .broken.py, line 4"),
        ("raise SystemExit(0)", "the module broken cannot be imported: SystemExit: 0"),
        ("import os\nos._exit(0)", r"the module broken cannot be imported: SystemExit: os._exit\(0\)"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_have_keys_is_refused(own, body, sentence):
    (own / "broken.py").write_text(f"from dataclasses import dataclass\nfrom persafl_lit import Objective\n\n{body}\n")
    importlib.invalidate_caches()
    try:
        with pytest.raises(ConfigError, match=sentence):
            compose(["method.objective=broken.Mine", "allow_code=true"])
    finally:
        sys.modules.pop("broken", None)


# -- entry points -----------------------------------------------------------------------------------------------------

PLAIN = "from persafl_lit import Plain\nclass Mine(Plain):\n    '''Theirs.'''\n"


def test_an_entry_point_is_a_name_like_any_other(site, capsys):
    package(
        site,
        "theirs",
        {"objectives": {"their": "theirs:Mine"}, "conf": {"theirs": "their_files.conf"}},
        theirs=PLAIN,
        their_files__conf__method__their_method="# Their method\nobjective: their\n",
    )
    config = compose(["method=their_method"])
    assert type(config.objective()).__name__ == "Mine"
    assert config.plugins() == ["theirs 1.2"]
    assert config.label().startswith("their_method")
    assert compose(["method.objective=their"]).hash() != compose(["method.objective=plain"]).hash()
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "Their method  (package theirs 1.2)" in listed
    assert "Theirs.  (package theirs 1.2)" in listed


def test_one_that_cannot_be_imported_is_warned_about_once_and_the_others_go_on(site, capsys):
    package(site, "broken_one", {"objectives": {"worse": "broken_one:Mine"}}, broken_one="raise SystemExit(0)")
    package(site, "theirs", {"objectives": {"their": "theirs:Mine"}}, theirs=PLAIN)
    assert main(["list"]) == 0
    assert main(["list"]) == 0
    out, err = capsys.readouterr()
    assert (
        err.count(
            "persafl: method.objective=worse of broken_one 1.2 (broken_one:Mine) cannot be imported: SystemExit: 0"
        )
        == 1
    )
    assert out.count("Theirs.  (package theirs 1.2)") == 2
    assert compose(["method.objective=their"])
    with pytest.raises(ConfigError, match="method.objective=worse of broken_one 1.2 .* cannot be imported: SystemExit"):
        compose(["method.objective=worse"])


def test_a_name_that_two_packages_define_is_refused_and_ours_stays_ours(site):
    for name in ("one", "other"):
        package(site, name, {"delays": {"twice": f"{name}:Mine", "constant": f"{name}:Mine"}}, **{name: PLAIN})
    with pytest.raises(
        ConfigError, match="delays=twice is defined by several packages: one 1.2 and other 1.2; uninstall all but one"
    ):
        compose(["delays=twice"])
    assert type(compose(["delays=constant"]).build("delays")).__name__ == "Constant"


def test_every_table_has_a_group_of_entry_points():
    kinds = {table.kind for table in TABLES.values()}
    assert kinds == {
        "objectives",
        "rules",
        "personal_models",
        "delays",
        "schedules",
        "data",
        "models",
        "metrics",
        "finetune",
        "callbacks",
        "loggers",
    }


# -- objects from Python ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scaled(Objective):
    factor: float = 1.0

    def gradient(self, f, step):
        return f.gradient(step.w, step.batches[0]).mul_(self.factor)


def test_an_object_is_recorded_by_its_class_and_values():
    result = run([*SMALL, "method=fedasync"], objective=Scaled(0.5))
    named = compose(
        [*SMALL, "method=fedasync", f"method.objective={path_of(Scaled)}", "method.factor=0.5", "allow_code=true"]
    )
    assert result.config.values == named.values
    assert result.config.hash() == named.hash()
    assert torch.equal(result.model.w, run(named).model.w)
    assert torch.equal(result.model.w, run([*SMALL, "method=fedasync", "eta=0.005"]).model.w)


def test_objects_and_classes_of_ours_are_recorded_by_name():
    config = compose(["method=persafl_me"]).with_parts(
        objective=Proximal(mu=0.3), rule=Descent, finetune=persafl_lit.Finetune()
    )
    assert config.method["objective"] == "proximal"
    assert config.method["mu"] == 0.3
    assert "lam" not in config.method
    assert config.eval.finetune == {"name": "none"}
    assert (
        config.hash()
        == compose(["method=persafl_me", "method.objective=proximal", "method.mu=0.3", "eval.finetune=none"]).hash()
    )
    assert compose().with_parts(objective=Maml).objective() == Maml()


def test_what_is_defined_in_a_function_works_from_python(tmp_path):
    class Local(Plain):
        pass

    @dataclasses.dataclass(frozen=True)
    class Fixed(Delays):
        def visit(self, seed, client, visit, local_steps, gradients):
            return 1, 0, 1, 0

    result = run(
        [*SMALL[:-1], "executor=processes", "workers=2"], objective=Local, delays=Fixed(), rule=Descent(beta=0.5)
    )
    assert result.config.method["objective"].endswith("<locals>.Local")
    assert result.config.label()
    assert result.timeline.arrives.tolist()[:5] == [2.0] * 4 + [4.0]
    assert compose(result.config.values).hash() == result.config.hash()


def test_an_object_that_its_fields_do_not_tell_is_refused():
    class Stateful(Plain):
        pass

    mine = Stateful()
    object.__setattr__(mine, "secret", 3)

    @dataclasses.dataclass(frozen=True)
    class Hidden(Plain):
        secret: int = dataclasses.field(default=0, metadata=persafl_lit.NOT_A_KEY)

    with pytest.raises(ConfigError, match="is not what its fields say"):
        run(SMALL, objective=Hidden(3))
    with pytest.raises(ConfigError, match="is no objective: make Descent a subclass of persafl_lit.Objective"):
        run(SMALL, objective=Descent())
    with pytest.raises(ConfigError, match="method.mu must be a finite number"):
        run(SMALL, objective=dataclasses.make_dataclass("Odd", [("mu", float)], bases=(Plain,), frozen=True)("x"))


def test_what_users_need_is_importable_from_the_package_and_costs_nothing():
    code = "import sys, persafl_lit\nprint([name for name in persafl_lit.__all__ if not hasattr(persafl_lit, name)])"
    light = "import sys, persafl_lit\nfrom persafl_lit import Objective, Rule, Delays, Schedule, Finetune, Callback\nprint(sorted({'torch', 'lightning'} & set(sys.modules)))"
    for probe in (code, light):
        assert (
            subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.strip()
            == "[]"
        )
    for name in (
        "Objective",
        "Plain",
        "Proximal",
        "Maml",
        "Moreau",
        "Rule",
        "Descent",
        "Delays",
        "Schedule",
        "Finetune",
        "Callback",
        "Federation",
        "Result",
        "run",
        "compose",
    ):
        assert name in persafl_lit.__all__


# -- code that misbehaves ---------------------------------------------------------------------------------------------


def body(expression, name="Mine"):
    namespace = {}
    exec(textwrap.dedent(f"""
        import os
        import torch
        from persafl_lit import Plain
        class {name}(Plain):
            def gradient(self, f, step):
                gradient = super().gradient(f, step)
                {expression}
    """), namespace)  # fmt: skip
    return namespace[name]


@pytest.mark.parametrize("executor", ["serial", "processes"])
@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("raise ValueError('no')", "client . cannot be trained: Mine fails: ValueError: no"),
        ("return gradient[:1]", r"client . cannot be trained: ValueError: Mine.gradient must return a tensor of shape \(10,\), that of step.w; got one of shape \(1,\)"),
        ("return None", "Mine.gradient must return a tensor of shape .*; got None"),
        ("return torch.tensor(1.0)", r"got one of shape \(\)"),
        ("raise SystemExit(0)", "client . cannot be trained: Mine fails: SystemExit: 0"),
        ("os._exit(0)", r"client . cannot be trained: Mine fails: SystemExit: os._exit\(0\)"),
    ],
)  # fmt: skip
def test_an_objective_that_fails_is_named_with_its_client(executor, expression, sentence):
    with pytest.raises(ModelError, match=sentence):
        run([*SMALL[:-1], f"executor={executor}", "workers=2", "data.dimension=10"], objective=body(expression))


def test_an_objective_that_never_asks_for_a_gradient_is_refused():
    class Still(Objective):
        def gradient(self, f, step):
            return 0 * step.w

    with pytest.raises(ModelError, match="Still.gradient must call f.gradient"):
        run(SMALL, objective=Still)


def rule(apply):
    return type("Mine", (Rule,), {"apply": apply})


@pytest.mark.parametrize(
    ("apply", "sentence"),
    [
        (lambda self, state, read, sent, staleness: 1 / 0, "the rule Mine fails at update 0: ZeroDivisionError"),
        (lambda self, state, read, sent, staleness: os._exit(0), "the rule Mine fails at update 0: SystemExit"),
        (
            lambda self, state, read, sent, staleness: None,
            r"the rule Mine must call self.arrive\(state\) once in apply",
        ),
        (
            lambda self, state, read, sent, staleness: state.w.sub_(sent["delta"]),
            "the rule Mine changes state.w in place",
        ),
        (lambda self, state, read, sent, staleness: setattr(state, "w", state.w[:1]), "it must be a tensor of shape"),
    ],
)
def test_a_rule_that_fails_is_named(apply, sentence):
    with pytest.raises(ModelError, match=sentence):
        run(SMALL, rule=rule(apply))


@pytest.mark.parametrize(
    ("visit", "sentence"),
    [
        (lambda *about: 1 / 0, "fails: ZeroDivisionError"),
        (lambda *about: (1, 2, 3), "Mine.visit must give download, compute, upload, idle >= 0"),
        (lambda *about: (1, 2, 3, -1), "Mine.visit must give"),
        (lambda *about: (0, 0, 0, 1), "not all of the first three 0"),
    ],
)
def test_delays_that_fail_are_named(visit, sentence):
    with pytest.raises(TimelineError, match=sentence):
        run(SMALL, delays=type("Mine", (Delays,), {"visit": visit}))
    with pytest.raises(TimelineError, match="Mine fails: NotImplementedError: Mine defines neither visit nor of"):
        run(SMALL, delays=type("Mine", (Delays,), {}))


def test_a_schedule_that_could_not_have_happened_is_refused():
    import numpy as np

    class Mine(Schedule):
        def timeline(self, setting):
            ones = np.ones(3)
            return jobs_to_timeline(setting.clients, np.zeros(3, dtype=int), np.array([0, 2, 1]), ones, 2 * ones, 2.0)

    with pytest.raises(TimelineError, match="Mine, job 1: a read from the future: reads=2"):
        run(SMALL, schedule=Mine)
    with pytest.raises(TimelineError, match="must give a Timeline; got 3"):
        run(SMALL, schedule=type("Three", (Schedule,), {"timeline": lambda self, setting: 3}))
    assert isinstance(compose(SMALL).timeline(4), Timeline)


def test_a_model_that_exits_is_an_error_in_every_way_it_may(own, capsys):
    text = "import os, lightning\nclass {}(lightning.LightningModule):\n    def __init__(self):\n        super().__init__()\n        {}\n"
    (own / "leaving_nets.py").write_text(
        text.format("Leaves", "raise SystemExit(0)") + text.format("Quits", "os._exit(0)")
    )
    importlib.invalidate_caches()
    for name, how in (("Leaves", "SystemExit: 0"), ("Quits", "SystemExit: os._exit(0)")):
        arguments = [
            "clients=3",
            "updates=5",
            "tracking.enabled=false",
            "model=custom",
            f"model.path=leaving_nets.{name}",
            "allow_code=true",
        ]
        assert main(["run", *arguments]) == 2
        assert how in capsys.readouterr().err


def test_a_data_set_that_exits_is_no_success(site, capsys):
    package(
        site,
        "theirs",
        {"data": {"leaving": "theirs:Mine"}},
        theirs="class Mine:\n    def federation(self, clients, seed):\n        raise SystemExit(0)\n",
    )
    assert main(["run", "data=leaving", "clients=3", "updates=5", "tracking.enabled=false"]) == 2
    assert "tried to end the program: SystemExit: 0" in capsys.readouterr().err


def test_where_a_model_and_data_by_path_come_from_is_recorded(own):
    """By a digest of the file: another content is another source."""
    (own / "my_model.py").write_text("class Net: ...\n")
    (own / "my_data.py").write_text("def clients(): ...\n")
    paths = ["data=custom", "data.path=my_data.clients", "model=custom", "model.path=my_model.Net"]
    digest = {
        name: hashlib.sha256((own / f"{name}.py").read_bytes()).hexdigest()[:12] for name in ("my_data", "my_model")
    }
    assert compose([*paths, "allow_code=true"]).plugins() == [
        f"{name} sha256:{digest[name]}" for name in sorted(digest)
    ]
    sys.modules.pop("my_model"), sys.modules.pop("my_data")
    assert compose(paths).plugins() == ["my_data.clients", "my_model.Net"], "nothing is imported without allow_code"
    assert compose(["model=custom", "model.path=torch.nn.Sequential"]).plugins() == []


# -- other processes --------------------------------------------------------------------------------------------------


def persafl(*arguments, cwd, **options):
    """As from a shell: `persafl` itself, in a folder that is not on the path."""
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path[:] = sys.path[1:]; from persafl_lit.cli import main; sys.exit(main())",
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *options.pop("path", [])])}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_sweep_of_own_parts_runs_in_other_processes(own, launcher):
    (own / "conf" / "method").mkdir(parents=True)
    (own / "conf" / "method" / "mine.yaml").write_text("# Mine\nobjective: my_parts.Gentle\nstrength: 0.7\n")
    (own / "own.yaml").write_text(
        "name: own\noverrides: [data=quadratic, clients=4, updates=12, local_steps=2, allow_code=true, tracking.figures=false]\n"
        "grid:\n  - {method: mine, method.strength: [0.1, 0.2]}\n  - {method: fedasync, method.objective: my_parts.Gentle, delays: my_parts.Slow}\nselect: {metric: loss.val}\n"
    )
    done = persafl("sweep", "own.yaml", "--json", "--launcher", launcher, "--workers", "2", cwd=own)
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [trial["status"] for trial in trials] == ["finished"] * 3
    alone = run([*SMALL, *OWN, "delays=my_parts.Slow"])
    assert trials[2]["loss.test"] == alone.summary()["loss"]["test"]
    assert persafl("report", "own", cwd=own).returncode == 0


@pytest.mark.slow
def test_own_parts_run_on_ray_with_the_same_bits(own):
    done = persafl("run", *SMALL[:-1], *OWN, "executor=ray", "workers=1", "--save-model", "ray.pt", cwd=own)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load("ray.pt", weights_only=True)["w"], run([*SMALL, *OWN]).model.w)


@pytest.mark.slow
def test_an_exit_on_ray_is_an_error_with_its_name(own):
    done = persafl(
        "run", *SMALL[:-1], "method.objective=my_parts.Quits", "allow_code=true", "executor=ray", "workers=1", cwd=own
    )
    assert done.returncode == 2, done.stderr
    assert "cannot be trained: Quits fails: SystemExit: os._exit(0)" in done.stderr


@pytest.mark.slow
def test_an_exit_in_a_trial_fails_it_with_its_name(own):
    grid = "grid:\n  - {method: fedasync, method.objective: [plain, my_parts.Quits]}\nselect: {metric: loss.val}\n"
    (own / "own.yaml").write_text(
        f"name: own\noverrides: [data=quadratic, clients=4, updates=12, allow_code=true, tracking.figures=false]\n{grid}"
    )
    done = persafl("sweep", "own.yaml", "--json", "--workers", "1", cwd=own)
    assert done.returncode == 3, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [trial["status"] for trial in trials] == ["finished", "failed"]
    assert "Quits fails: SystemExit: os._exit(0)" in trials[1]["error"]


def test_resolving_is_strict_about_what_is_said():
    for name in (None, 3, "", ".", "a.", "a b.c", "os", "../x", "x.<locals>.y"):
        with pytest.raises(ConfigError, match="unknown method.objective"):
            resolve("method.objective", name, allow_code=True)


# -- parts that would spoil a run without a word ------------------------------------------------------------------------


@dataclass(frozen=True)
class InPlace(Finetune):
    full: ClassVar[bool] = True

    def personalise(self, client, w, batches, whole):
        return w.sub_(client.whole_gradient(w, whole), alpha=0.01)


@dataclass(frozen=True)
class Nothing(Finetune):
    def personalise(self, client, w, batches, whole):
        return None


@dataclass(frozen=True)
class HalvesRead(Objective):
    def gradient(self, f, step):
        step.read.mul_(0.5)
        return f.gradient(step.w, step.batches[0])


@dataclass(frozen=True)
class OwnBeta(Objective):
    beta: float = 3.0

    def gradient(self, f, step):
        return f.gradient(step.w, step.batches[0]).mul_(self.beta)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"finetune": InPlace()}, "InPlace.personalise changes w in place"),
        ({"finetune": Nothing()}, "Nothing.personalise must return a tensor like w, of shape .* got NoneType"),
        ({"objective": HalvesRead()}, "HalvesRead.gradient changes step.read in place"),
        (
            {"objective": OwnBeta()},
            r"method.beta would be a key of two parts of the method \(OwnBeta, Descent\)",
        ),
    ],
)
def test_what_would_spoil_a_run_without_a_word_is_refused(parts, sentence):
    tiny = [
        "method=fedasync",
        "model=logistic",
        "clients=4",
        "updates=6",
        "executor=serial",
        "tracking.enabled=false",
        "checkpoint.every=0",
    ]
    with pytest.raises(PersaflError, match=sentence):
        persafl_lit.run(tiny, **parts)
