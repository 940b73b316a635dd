"""Who may import whom: read from the source, so that the parts stay apart."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "persafl_lit"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS_FOLDER = Path(__file__).parent
TESTS = sorted(TESTS_FOLDER.rglob("*.py"))

# Lowest first: a part may import parts of its own row and of rows above it in this list, never below.
LAYERS = [
    {"errors", "callbacks"},
    {"common"},
    {"timeline"},
    {"data"},
    {"models"},
    {"server"},
    {"learning"},
    {"config"},
    {"engine"},
    {"report"},
    {"tracking"},
    {"api"},
    {"sweep", "theory"},
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


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(TESTS_FOLDER)))
def test_no_test_imports_from_a_file_of_tests(path):
    """What several of them need is in tests/support; code in strings, which other processes run, counts as well."""
    named = re.findall(r"^\s*(?:from|import) (tests\.(?:\w+\.)*test_\w+)", path.read_text(), flags=re.MULTILINE)
    assert not named, f"{path.name} imports {', '.join(named)}"


def test_every_part_has_its_layer():
    assert {part_of(path) for path in SOURCES} == set(LEVEL)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards_only(path):
    own = part_of(path)
    for name in imports(path):
        root, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if root == "persafl_lit" and other in LEVEL:
            assert other == own or LEVEL[other] < LEVEL[own], f"{own} imports {other}"


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("torch", {"common", "data", "models", "server", "learning", "engine", "api", "cli", "tracking"}),
        ("lightning", {"models", "learning", "engine"}),
        ("torchmetrics", {"learning"}),
        ("mlflow", {"tracking"}),
        ("ray", {"engine", "sweep"}),
        ("optuna", {"sweep"}),
        ("omegaconf", {"config"}),
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


@pytest.mark.parametrize(
    ("library", "files"),
    [("ray", {"ray_cluster.py", "ray_launcher.py"}), ("mlflow", {"store.py"}), ("optuna", {"optuna_search.py"})],
)
def test_few_files_know_the_library(library, files):
    users = {path.name for path in SOURCES for name in imports(path) if name.split(".")[0] == library}
    assert users == files


# -- cycles -----------------------------------------------------------------------------------------------------------


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(sources):
    """Module -> the modules of the package that it imports, within functions too; `sources` are texts by module."""
    graph = {}
    for module, text in sources.items():
        tree = ast.parse(text)
        skipped, found = type_checking(tree), set()
        for node in ast.walk(tree):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (names & sources.keys()) | ({node.module} if names - sources.keys() else set())
        graph[module] = (found & sources.keys()) - {module}
    return graph


def strong_components(graph):
    """Sets of two or more modules that reach each other."""

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reach = {module: reached(module) for module in graph}
    return {frozenset(other for other in graph if other in reach[m] and m in reach[other]) for m in graph} - {
        frozenset()
    }


def test_no_modules_import_each_other_in_a_circle_not_even_within_functions():
    sources = {module_of(path): path.read_text() for path in SOURCES}
    assert strong_components(import_graph(sources)) == set()


def test_the_search_for_circles_finds_those_within_functions_and_not_those_of_types_alone():
    sources = {
        "p.a": "from p import b",
        "p.b": "def f():\n    from p.c import g",
        "p.c": "import p.a",
        "p.d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.e import h",
        "p.e": "from p.d import i",
        "p": "",
    }
    assert strong_components(import_graph(sources)) == {frozenset({"p.a", "p.b", "p.c"})}


def test_the_root_of_the_package_holds_at_most_six_modules():
    assert len(list(PACKAGE.glob("*.py"))) <= 6


@pytest.mark.parametrize(
    ("call", "files"),
    [
        ("fcntl.lockf", {"common/lock.py"}),
        ("fcntl.flock", set()),
        ("csv.writer", {"common/csv_table.py"}),
        ("csv.DictWriter", set()),
        # Beside the one writer of files: a checkpoint becomes the previous one, MLflow's tables and downloaded files
        # are moved into place when others have made them.
        ("os.replace", {"common/atomic_file.py", "engine/checkpoint.py", "tracking/store.py", "data/download.py"}),
    ],
)
def test_there_is_one_of_each(call, files):
    owner, name = call.split(".")
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == name and getattr(node.value, "id", None) == owner
    }
    assert users == files


# -- names ------------------------------------------------------------------------------------------------------------

# A name that several files define means the same in all of them.
SHARED_NAMES = {
    "logger",  # a module's
    "T",  # a type variable
    "main",  # where a process begins
    "run",  # a command and what it runs
    "sync",  # likewise
}


def defined(tree):
    """Public names at the top level of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_a_public_name_is_defined_once_in_the_package():
    files = {}
    for path in SOURCES:
        for name in set(defined(ast.parse(path.read_text()))):
            files.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    shared = {name: where for name, where in files.items() if len(where) > 1 and not name.startswith("_")}
    assert {name: where for name, where in shared.items() if name not in SHARED_NAMES} == {}
    assert shared.keys() >= SHARED_NAMES, "an exception that is none any more"
