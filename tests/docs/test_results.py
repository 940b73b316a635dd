"""The page of results says what its CSV files say, and nothing else."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

RESULTS = Path(__file__).parents[2] / "docs/results"


@pytest.fixture
def rendered(tmp_path: Path) -> Any:
    """The page, rendered anew from a copy of the CSV files; and the module that did it."""
    shutil.copytree(RESULTS.parents[1] / "sweeps", tmp_path / "sweeps")
    shutil.copytree(RESULTS, tmp_path / "docs/results", ignore=shutil.ignore_patterns("figures", "__pycache__"))
    spec = importlib.util.spec_from_file_location("render", tmp_path / "docs/results/render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["render"] = module
    spec.loader.exec_module(module)
    yield module, module.render()
    del sys.modules["render"]


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


def test_intervals_are_students(rendered: Any) -> None:
    module, _ = rendered
    low, high = module.interval(pd.Series([1.0, 2.0, 3.0]))
    assert (low, high) == pytest.approx(
        (2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6
    )  # t(0.975, 2) = 4.302653, s = 1
    assert module.interval(pd.Series([1.0])) is None


def test_equal_work_is_bracketed_by_the_evaluations_around_it(rendered: Any) -> None:
    module, _ = rendered
    runs = pd.DataFrame(
        {"method": ["fedasync"], "seed": [0], "status": ["FINISHED"], "trial": ["a"], "accuracy_val": [0.9]}
    )
    curves = pd.DataFrame(
        {"trial": ["a"] * 3, "sim_time": [0.0, 1.0, 2.0], "grad_evals": [0, 10, 20], "accuracy_test": [0.1, 0.2, 0.3]}
    )
    results = module.Results("x", runs, curves)
    within, beyond = results.around("fedasync", "grad_evals", pd.Series({0: 19}))
    assert (within.tolist(), beyond.tolist()) == ([0.2], [0.3])
    within, beyond = results.around("fedasync", "grad_evals", pd.Series({0: 10}))
    assert (within.tolist(), beyond.tolist()) == ([0.2], [0.2])
    within, beyond = results.around("fedasync", "grad_evals", pd.Series({0: 99}))
    assert (within.tolist(), beyond.tolist()) == ([0.3], [0.3])
