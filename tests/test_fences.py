"""Who may import whom: read from the source, so that the parts stay apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "persafl_lit"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Lowest first: a part may import parts of its own row and of rows above it in this list, never below.
LAYERS = [
    {"errors", "limits", "streams", "lock", "memory", "dropout", "backprop", "statistics", "messages", "callbacks", "plugins"},
    {"timeline", "data", "models", "objectives", "typed", "nested", "inputs", "settings"},
    {"server", "loss", "written", "finetune", "optimizers", "sharing", "sealed"},
    {"client", "buffers", "registry", "metrics"},
    {"evaluate"},
    {"executors"},
    {"slots", "listeners"},
    {"checkpoint"},
    {"experiment"},
    {"report"},
    {"config", "tracking", "progress"},
    {"api", "config_reference"},
    {"demo", "sweep", "theory"},
    {"cli"},
    {"__main__", "__init__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def part_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def type_checking(tree):
    """Nodes under `if TYPE_CHECKING:`: they are not imported when the program runs."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def imports(path):
    tree = ast.parse(path.read_text())
    skipped = type_checking(tree)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "persafl_lit":
                yield from (f"persafl_lit.{alias.name}" for alias in node.names)


def test_every_part_has_its_layer():
    assert {part_of(path) for path in SOURCES} == set(LEVEL)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards_only(path):
    own = part_of(path)
    for name in imports(path):
        root, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if root == "persafl_lit" and other in LEVEL:
            assert other == own or LEVEL[other] < LEVEL[own] or (LEVEL[other] == LEVEL[own] and LEVEL[own] < 2), f"{own} imports {other}"


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        (
            "torch",
            {
                "data",
                "models",
                "dropout",
                "backprop",
                "statistics",
                "optimizers",
                "loss",
                "metrics",
                "client",
                "evaluate",
                "executors",
                "sealed",
                "listeners",
                "experiment",
                "api",
                "cli",
                "objectives",
                "tracking",
            },
        ),
        ("lightning", {"client", "executors", "experiment", "listeners", "metrics"}),
        ("torchmetrics", {"metrics"}),
        ("mlflow", {"tracking"}),
        ("ray", {"executors", "sweep"}),
        ("optuna", {"sweep"}),
        ("omegaconf", {"written"}),
        ("matplotlib", {"timeline", "report", "theory"}),
        ("plotly", {"report"}),
        ("scipy", {"report", "theory"}),
    ],
)
def test_libraries_stay_behind_their_fences(library, allowed):
    users = {part_of(path) for path in SOURCES for name in imports(path) if name.split(".")[0] == library}
    assert users <= allowed


def test_the_timeline_knows_nothing_but_numpy_and_only_drawing_plots():
    for path in (PACKAGE / "timeline").glob("*.py"):
        used = {name.split(".")[0] for name in imports(path)}
        assert not used & {"torch", "lightning", "mlflow", "omegaconf"}
        assert path.name == "drawing.py" or "matplotlib" not in used


@pytest.mark.parametrize(("library", "file"), [("ray", "cluster.py"), ("mlflow", "store.py"), ("optuna", "adaptive.py")])
def test_one_file_knows_the_library(library, file):
    users = {path.name for path in SOURCES for name in imports(path) if name.split(".")[0] == library}
    assert users == {file}
