"""The page of results says what its CSV files say, and nothing else."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

RESULTS = Path(__file__).parents[2] / "docs/results"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page, rendered anew from a copy of the CSV files; and the module that did it."""
    tmp_path = tmp_path_factory.mktemp("rendered")
    shutil.copytree(RESULTS.parents[1] / "sweeps", tmp_path / "sweeps")
    shutil.copytree(RESULTS, tmp_path / "docs/results", ignore=shutil.ignore_patterns("figures", "__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path / "docs/results")
        module = importlib.import_module("render")
        yield module, module.render()
    for name in [name for name in sys.modules if name.split(".")[0] in ("render", "rendering")]:
        del sys.modules[name]


def test_the_page_is_what_the_csv_files_give(rendered: Any) -> None:
    _, page = rendered
    assert page.text() == (RESULTS / "README.md").read_text(encoding="utf-8"), "run `make results`"


def test_the_readme_begins_with_what_the_csv_files_give(rendered: Any) -> None:
    module, _ = rendered
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    assert module.with_headline(readme, module.headline(module.Page())) == readme, "run `make results`"


def test_every_number_on_the_page_was_computed(rendered: Any) -> None:
    _, page = rendered
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|95 %|CIFAR-10", "", (RESULTS / "README.md").read_text(encoding="utf-8"))
    sources = " ".join(
        pd.read_csv(path).select_dtypes("object").to_string() for path in RESULTS.glob("*/published.csv")
    )
    written = set(re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)", prose)) - set(re.findall(r"\d+", sources))
    assert written
    assert written <= page.numbers


def test_a_mean_has_students_interval_or_its_seeds(rendered: Any) -> None:
    page = rendered[0].Page()
    half = 4.302653 * 0.01 / 3**0.5  # t(0.975, 2) = 4.302653, s = 0.01
    assert page.mean(pd.Series([0.49, 0.5, 0.51])) == f"0.500 [{0.5 - half:.3f}, {0.5 + half:.3f}]"
    assert page.mean(pd.Series([0.98, 0.99, 1.0])) == "0.990 (three seeds: 0.980, 0.990, 1.000)"  # beyond 1
    assert page.mean(pd.Series([0.2, 0.1])) == "0.150 (two seeds: 0.100, 0.200)"
    assert page.mean(pd.Series([0.2])) == "0.200 (one seed)"
    low, high = pd.Series([0.1, 0.2]), pd.Series([0.3, 0.5])
    assert page.difference(high, low) == "+0.250 (two seeds: +0.200, +0.300), undecided"
    with pytest.raises(ValueError, match="twice"):
        page.mean(pd.Series([0.1, 0.2, 0.3], index=[0, 1, 1]))


def test_every_factor_of_the_robustness_sweep_has_a_row_and_every_trial_a_place(rendered: Any) -> None:
    _, page = rendered
    table = page.text().split("| what is different |")[1].split("\n\n")[0]
    rows = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]}
    blocks = yaml.safe_load((RESULTS.parents[1] / "sweeps/robustness_mnist.yaml").read_text(encoding="utf-8"))["grid"]
    varied = {key: value for block in blocks for key, value in block.items()}
    for own in ("method", "method.beta", "method.alpha", "method.lam", "schedule.policy"):
        del varied[own]
    factors = {
        f"{key} = {value}"
        for key, values in varied.items()
        for value in (values if isinstance(values, list) else [values])
    }
    assert {row.split(", ")[0] for row in rows} == {"nothing", *factors}


def test_equal_work_is_bracketed_by_the_evaluations_around_it(rendered: Any) -> None:
    runs = pd.DataFrame(
        {"method": ["fedasync"], "seed": [0], "status": ["FINISHED"], "trial": ["a"], "accuracy_val": [0.9]}
    )
    curves = pd.DataFrame(
        {"trial": ["a"] * 3, "sim_time": [0.0, 1.0, 2.0], "grad_evals": [0, 10, 20], "accuracy_test": [0.1, 0.2, 0.3]}
    )
    results = sys.modules["rendering.exported"].Results("x", runs, curves)
    within, beyond = results.around("fedasync", "grad_evals", pd.Series({0: 19}))
    assert (within.tolist(), beyond.tolist()) == ([0.2], [0.3])
    within, beyond = results.around("fedasync", "grad_evals", pd.Series({0: 10}))
    assert (within.tolist(), beyond.tolist()) == ([0.2], [0.2])
    within, beyond = results.around("fedasync", "grad_evals", pd.Series({0: 99}))
    assert (within.tolist(), beyond.tolist()) == ([0.3], [0.3])
