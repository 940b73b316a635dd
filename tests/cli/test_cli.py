"""The command line as outside tools rely on it: JSON, files, exit codes, one sentence per mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from persafl_lit import __version__
from persafl_lit.cli import main
from tests.support.quadratics import random_quadratics, save

FAST = ["model=logistic", "clients=5", "updates=15", "local_steps=2", "tracking.enabled=false"]


def persafl(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "persafl_lit", *arguments], capture_output=True, text=True, timeout=300, **options
    )


def test_json_is_one_object_with_the_promised_keys(capsys):
    assert main(["run", *FAST, "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    promised = [
        "run_id",
        "method",
        "seed",
        "updates",
        "sim_time",
        "grad_evals",
        "dropped",
        "staleness",
        "concurrency",
        "accuracy",
        "wall_seconds",
        "config",
    ]
    assert set(promised) <= set(summary)
    assert set(summary["staleness"]) == {"mean", "max"}
    assert set(summary["accuracy"]) >= {"val", "test", "std", "worst_decile", "global"}
    assert (summary["method"], summary["updates"], summary["config"]["clients"]) == ("persafl_me", 15, 5)
    assert all(0 <= value <= 1 for value in summary["accuracy"].values())
    assert "update 15/15" in captured.err, "progress goes to stderr"


def test_accuracy_on_quadratics_is_null(capsys):
    assert main(["run", "data=quadratic", "updates=5", "tracking.enabled=false", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["accuracy"]["test"] is None
    assert summary["loss"]["test"] > 0


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "scaffold",
        "fedbuff",
        "fedasync_mix",
        "local",
        "per_fedavg",
        "pfedme",
        "fedprox",
        "fedadam",
        "ca2fl",
        "ace",
    ],
)
def test_every_method_runs(method, capsys):
    rounds = ("fedavg", "scaffold", "per_fedavg", "pfedme", "fedprox", "fedadam")
    cohort = ["schedule.cohort=3"] if method in rounds else []
    assert main(["run", *FAST, f"method={method}", *cohort, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == method


def test_a_saved_model_loads_with_weights_only(capsys, tmp_path):
    assert main(["run", *FAST, "--save-model", "model.pt"]) == 0
    state = torch.load("model.pt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "network.1.weight": (10, 64),
        "network.1.bias": (10,),
    }
    assert "personalised test accuracy" in capsys.readouterr().out


def test_a_quadratic_run_saves_its_vector(tmp_path):
    H, a = random_quadratics(4, 3)
    path = save(tmp_path / "q.npz", H, a)
    assert (
        main(
            [
                "run",
                "data=quadratic",
                f"data.path={path}",
                "updates=5",
                "tracking.enabled=false",
                "--save-model",
                "w.pt",
            ]
        )
        == 0
    )
    assert torch.load("w.pt", weights_only=True)["w"].shape == (3,)


def test_timeline_writes_csv_png_and_json(capsys, tmp_path):
    assert (
        main(["timeline", "clients=5", "local_steps=3", "horizon=20", "--csv", "t.csv", "--png", "t.png", "--json"])
        == 0
    )
    summary = json.loads(capsys.readouterr().out)
    rows = (tmp_path / "t.csv").read_text().splitlines()
    assert rows[0] == "client,visit,reads,read_at,arrives"
    assert len(rows) == summary["updates"] + 1
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert sum(summary["arrivals_per_client"]) == sum(summary["staleness"]["histogram"]) == summary["updates"]


@pytest.mark.parametrize(
    "schedule", [["schedule=rounds", "method=fedavg", "schedule.cohort=2"], ["schedule=drawn"], ["schedule.tau=3"]]
)
def test_every_schedule_can_be_drawn(schedule, tmp_path):
    assert main(["timeline", "clients=4", "horizon=20", *schedule, "--png", "t.png"]) == 0
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_a_timeline_is_replayed_by_a_run(capsys):
    setup = ["clients=5", "local_steps=2"]
    assert main(["timeline", *setup, "horizon=30", "--csv", "t.csv"]) == 0
    capsys.readouterr()
    outcomes = []
    for schedule in (["horizon=30"], ["schedule=replay", "schedule.path=t.csv"]):
        assert main(["run", *setup, "model=logistic", "tracking.enabled=false", *schedule, "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        outcomes.append([summary[key] for key in ("updates", "staleness", "grad_evals", "accuracy", "loss")])
    assert outcomes[0] == outcomes[1]


def test_list_names_every_choice_with_a_line(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in (
        "persafl_me",
        "scaffold",
        "local",
        "perplexity",
        "digits",
        "quadratic",
        "cnn2",
        "cnn3",
        "mlp",
        "logistic",
        "rounds",
        "drawn",
        "pareto",
        "prox",
    ):
        assert f"  {name} " in text


def test_version_and_help(capsys):
    for arguments, expected in (
        (["--version"], __version__),
        (["--help"], "timeline"),
        (["run", "--help"], "--save-model"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    probe = "import sys, persafl_lit.cli as c; c._parser(); print([m for m in ('torch', 'lightning', 'mlflow', 'numpy', 'omegaconf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_timelines_and_config_errors_need_no_torch():
    probe = (
        "import sys; from persafl_lit.cli import main\n"
        "print(main(['timeline', 'clients=5', '--json']), main(['run', 'method=nope']), main(['run', 'method.lamb=1']),"
        " [m for m in ('torch', 'lightning', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 2 2 []"


# -- bad input --------------------------------------------------------------------------------------------------------


def bad_npz(path):
    np.savez(path / "bad.npz", H=np.zeros((2, 3, 4)), a=np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "metod=fedavg"], "unknown key 'metod'"),
        (["run", "method=fedagv"], "Did you mean 'fedavg'"),
        (["run", "local_steps=-3"], "local_steps must be >= 1; got -3"),
        (["run", "data.classes_per_client=11"], "data has 10 classes"),
        (["run", "clients=5000"], "5000 clients need at least"),
        (["run", "data=quadratic", "data.path=bad.npz"], "H must have the shape (2, 3, 3)"),
        (["run", "data=quadratic", "data.path=none.npz"], "No such file"),
        (["run", "schedule=replay", "schedule.path=gap.csv"], "line 3: a gap"),
        (["run", "schedule=replay", "schedule.path=none.csv"], "No such file"),
        (["run", "method.lam=25", "method.inner_lr=0.09"], "diverges"),
        (["run", "data=quadratic", "data.condition=100", "method.lam=1", "method.inner_lr=0.5"], "diverges"),
        (["run", "horizon=0.001"], "no update arrives by horizon=0.001"),
        (["run", "--save-model", "no/such/folder/m.pt"], "is not a writable folder"),
        (["run", "tracking.uri=sqlite:////proc/nope/mlflow.db"], "cannot track to"),
        (["timeline", "--csv", "."], "it is a folder"),
        (["timeline", "schedule=rounds", "schedule.cohort=99"], "schedule.cohort=99 is more than the 30 clients"),
        (["demo", "method=fedavg"], "the demo chooses its methods itself"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, capsys, tmp_path):
    bad_npz(tmp_path)
    (tmp_path / "gap.csv").write_text("client,visit,reads,read_at,arrives\n0,0,0,0.0,1.0\n0,2,1,1.5,2.0\n")
    tracking = [] if arguments[0] != "run" or any("tracking" in a for a in arguments) else ["tracking.enabled=false"]
    assert main([*arguments, *tracking]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.startswith("persafl: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_run_that_diverges_names_update_client_and_step_size(capsys):
    assert (
        main(["run", "data=quadratic", "method=fedasync", "eta=1e6", "updates=500", "tracking.enabled=false", "--json"])
        == 3
    )
    captured = capsys.readouterr()
    assert "the run diverges: update" in captured.err
    assert "client" in captured.err
    assert "eta=1e+06" in captured.err
    assert captured.out == ""


def test_overrides_may_follow_a_flag(capsys):
    assert main(["timeline", "clients=5", "--json", "horizon=10"]) == 0
    assert json.loads(capsys.readouterr().out)["sim_time"] == 10
    with pytest.raises(SystemExit):
        main(["timeline", "--jsn"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["eta=1e39"], "eta must be a finite number"),
        (["method.objective=[1]"], "unknown method.objective"),
        (["eval.every=1e-9"], "evaluations by simulated time"),
        (["checkpoint.dir=afile"], "choose another checkpoint.dir"),
        (["eval.finetune=prox", "eval.finetune.lr=0.1"], "eval.finetune.lr=0.1 diverges"),
        (["batch_size=1e30"], "batch_size must be a whole number"),
    ],
)
def test_extreme_values_are_refused(arguments, sentence, capsys, tmp_path):
    (tmp_path / "afile").write_text("")
    assert main(["run", *FAST, *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_demo_compares_at_equal_times_only(capsys):
    assert main(["demo", "updates=5"]) == 2
    assert "equal simulated time" in capsys.readouterr().err


def test_a_broken_pipe_is_not_an_error():
    done = subprocess.run(f"{sys.executable} -m persafl_lit list | head -1", shell=True, capture_output=True, text=True)
    assert done.stdout == "method=\n"
    assert done.stderr == ""


def test_bad_input_leaves_no_files(tmp_path):
    done = persafl("run", "eta=-1", "--save-model", "m.pt", cwd=tmp_path)
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_run_says_which_model_was_evaluated_when_on_what(capsys):
    common = ["run", "tracking.enabled=false", "checkpoint.every=0", "model=mlp", "model.hidden=[8]", "clients=4"]
    common += ["updates=4", "eval.finetune=none"]

    def said(*overrides):
        assert main([*common, *overrides]) == 0
        return " ".join(capsys.readouterr().out.split()).partition("Evaluated at")[2]

    number = r"0\.\d{4}"
    when = r"simulated time [\d.]+ on test data, accuracy as it is / after fine-tuning by none: "
    assert re.search(rf"{when}the shared model ({number}) / \1 \(4 clients\)\.", said("method=fedasync"))
    own = rf"the model with private head ({number}) / \2 \(4 clients\)"
    assert re.search(rf"{when}the shared model ({number}) / \1, {own}\.", said("method=fedper"))
    assert re.search(rf"{when}the model with private all ({number}) / \1 \(4", said("method=local")), (
        "nothing is shared"
    )
    assert "the personal model of ditto" in said("method=ditto")
    assert "the proximal point" in said("method=persafl_me", "method.inner_steps=2")
    assert "1 clients that never trained" in said("method=ditto", "data.holdout_clients=1")


def test_each_clients_own_model_is_saved(tmp_path):
    settings = ["tracking.enabled=false", "clients=3", "updates=6", "model=mlp", "model.hidden=[8]", "method=fedper"]
    assert (
        main(["run", *settings, "--save-clients", str(tmp_path / "own"), "--save-model", str(tmp_path / "m.pt")]) == 0
    )
    saved = {path.name: torch.load(path, weights_only=True) for path in (tmp_path / "own").iterdir()}
    assert sorted(saved) == ["client_0.pt", "client_1.pt", "client_2.pt"]
    shared = torch.load(tmp_path / "m.pt", weights_only=True)
    body, head = "network.2.weight", "network.5.weight"
    assert all(torch.equal(state[body], shared[body]) for state in saved.values())
    assert not torch.equal(saved["client_0.pt"][head], saved["client_1.pt"][head])
    (tmp_path / "file").touch()
    assert main(["run", *settings, "--save-clients", str(tmp_path / "file")]) == 2


@pytest.mark.slow
def test_the_demo_is_the_sweep_demo_and_its_table_has_the_runs_numbers(capsys):
    small = ["model=logistic", "clients=10", "horizon=10", "eval.every=5", "local_steps=1", "tracking.figures=false"]
    assert main(["demo", *small]) == 0
    first = capsys.readouterr()
    assert main(["sweep", "demo", *small, "--json"]) == 0
    again = capsys.readouterr()
    assert "4/4" in first.err
    assert "/4" not in again.err, "all of it is done"
    trials = {trial["method"]: trial for trial in json.loads(again.out)["trials"]}
    rows = [line.split() for line in first.out.splitlines() if line.strip().startswith(("Fed", "PersA"))]
    assert [row[0] for row in rows] == ["FedAvg", "FedAsync", "PersA-FL-MAML", "PersA-FL-ME"]
    for row, method in zip(rows, ("fedavg", "fedasync", "persafl_maml", "persafl_me"), strict=True):
        assert row[3] == f"{trials[method]['accuracy.test']:.3f}", "at t=10"
        assert (int(row[4]), int(row[6])) == (trials[method]["updates"], trials[method]["grad_evals"])
    assert main(["demo", *small]) == 0
    assert capsys.readouterr().out.splitlines()[:-7] == first.out.splitlines()[:-7], "but for the time that it took"
