"""The examples and docs/extending.md are executed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from persafl_lit.cli import main

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```(bash|python|yaml)\n(.*?)```", PAGE, flags=re.DOTALL)
SMALL = [
    "clients=4",
    "updates=20",
    "horizon=null",
    "model=logistic",
    "eval.every=5",
    "executor=serial",
    "tracking.figures=false",
]
ARGUMENTS = {
    "own_data": ["updates=8", "executor=serial", "tracking.figures=false"],
    "resnet_batchnorm": ["--small"],
    "text_perplexity": ["updates=12", "executor=serial", "tracking.figures=false"],
}
"""Of those that bring a network of their own; all others are run SMALL."""


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_works(path, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [sys.executable, path, *ARGUMENTS.get(path.stem, SMALL)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if path.stem == "tensorboard_beside_mlflow":
        assert list(tmp_path.glob("logs/**/events.*"))
    if path.stem == "measured_delays":
        assert "delays=measured_delays.Measured" in done.stdout


def test_every_example_is_linked_and_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert {f"../examples/{path.name}" for path in EXAMPLES} <= set(links)
    for link in links:
        assert (ROOT / "docs" / link).resolve().is_file(), link


def test_every_name_on_the_page_exists():
    """A name is one of the package's own, a module with perhaps something in it, or a group of entry points."""
    import persafl_lit
    from persafl_lit.config.registry import TABLES

    groups = {"conf", *(table.kind for table in TABLES.values())}
    for name in re.findall(r"persafl_lit\.([A-Za-z_]+(?:\.[A-Za-z_]+)*)", PAGE):
        if name in persafl_lit.__all__ or name in groups or name == "run":
            continue
        module, _, last = f"persafl_lit.{name}".rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, last) or importlib.util.find_spec(f"{module}.{last}"), name
    groups_named = re.findall(r'entry-points."persafl_lit\.([\w.]+)"|entry point of `persafl_lit\.([\w.]+)`', PAGE)
    assert {"".join(pair) for pair in groups_named} <= groups
    for path in re.findall(r"`((?:persafl_lit|tests|docs)/[\w/]+\.\w+)`", PAGE):
        assert (ROOT / path).is_file(), path


@pytest.mark.slow
def test_the_page_works_from_top_to_bottom(tmp_path, monkeypatch):
    """A block that begins with the name of a file is that file."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    commands = 0
    for kind, block in BLOCKS:
        if kind == "bash":
            for line in block.splitlines():
                assert main(shlex.split(line, comments=True)[1:]) == 0, line
                commands += 1
        elif (named := re.match(r"# ([\w/]+\.(?:py|yaml))\n", block)) is not None:
            (tmp_path / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / named[1]).write_text(block[named.end() :])
            importlib.invalidate_caches()
        elif kind == "python":
            (tmp_path / "block.py").write_text(f"{block}\nassert 0 <= result.accuracy['test'] <= 1\n")
            done = subprocess.run(
                [sys.executable, "block.py"], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
    sys.modules.pop("my_parts", None)
    assert commands >= 6
    assert list((tmp_path / "logs").rglob("metrics.csv"))
