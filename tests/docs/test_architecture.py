"""The pages about the code describe the code that is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "where_is_what.md").read_text()
PACKAGE = DOCS.parent / "persafl_lit"


def test_the_walk_names_at_most_nine_files_and_they_and_all_linked_ones_exist():
    steps = re.findall(r"^\d+\. \[.*?\]\((.*?)\)", PAGE, flags=re.MULTILINE)
    assert 5 <= len(steps) <= 9
    linked = re.findall(r"\]\(([^)]*)\)", PAGE)
    assert set(steps) <= set(linked)
    assert [target for target in linked if not (DOCS / target).exists()] == []


def test_every_name_of_the_walk_is_in_the_file_of_its_step():
    """Calls and classes in backquotes: `Worker.train` is in worker.py."""
    walk = PAGE.partition("## The parts")[0]
    for path, text in re.findall(r"^\d+\. \[.*?\]\((.*?)\): (.*)$", walk, flags=re.MULTILINE):
        source = (DOCS / path).read_text()
        for name in re.findall(r"`([A-Z]\w+\.\w+)`", text):
            owner, _, method = name.partition(".")
            file = PACKAGE / "engine/experiment.py" if owner == "Experiment" else None
            told = file.read_text() if file else source
            assert re.search(rf"^class {owner}\b", told, flags=re.MULTILINE), name
            assert re.search(rf"^    def {method}\b", told, flags=re.MULTILINE), name


def test_the_table_of_parts_is_complete():
    table = set(re.findall(r"`([\w.]+?)/?`", "".join(re.findall(r"^\| (`.*?) \|", PAGE, flags=re.MULTILINE))))
    there = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("__") and path.name != "py.typed"}
    assert table == there


def test_the_import_graph_is_the_one_that_the_script_draws():
    spec = importlib.util.spec_from_file_location("import_graph", DOCS / "architecture/import_graph.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (DOCS / "architecture/import_graph.svg").read_text() == script.svg()
    drawn = {name for row in script.ROWS for name in row} | script.EVERYWHERE
    assert drawn >= {
        path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.name not in ("py.typed", "__pycache__")
    }


def test_the_files_and_tables_that_contributing_names_are_there():
    text = (DOCS.parent / "CONTRIBUTING.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    for _, part, file, table, laws, _ in rows:
        for path in re.findall(r"`((?:\w+/)+(?:\w+\.py|\w+\.yaml))`", file + table + laws):
            kind = path.replace("NAME.py", "").replace("NAME.yaml", "")
            assert (PACKAGE / kind).exists() or (DOCS.parent / kind).exists(), f"{part}: {path}"
        for name in re.findall(r"`([A-Z]{3,})`", table):
            (where,) = re.findall(r"in `([\w/]+\.py)`", table) or re.findall(r"`([\w/]+\.py)`", file)
            assert re.search(rf"^{name}\b", (PACKAGE / where).read_text(), flags=re.MULTILINE), f"{part}: {name}"
