"""Draws who imports whom, part by part: `python docs/architecture/import_graph.py` writes import_graph.svg beside it.

An arrow goes from a part to one that it imports, when it is loaded or within functions; imports for types alone do not
count. Rows are the layers that tests/test_fences.py keeps.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent / "persafl_lit"
# Highest first. `common` and `errors` are imported by nearly all parts: they are drawn without arrows.
ROWS = [
    ["cli"],
    ["sweep", "theory"],
    ["api"],
    ["tracking", "report"],
    ["engine"],
    ["config"],
    ["learning"],
    ["server", "models"],
    ["data", "timeline"],
    ["common", "errors"],
]
EVERYWHERE = {"common", "errors", "callbacks", "__init__", "__main__"}
WIDTH, ROW, BOX, HIGH = 760, 84, 120, 36


def edges() -> set[tuple[str, str]]:
    """(part, part that it imports)."""
    found: set[tuple[str, str]] = set()
    drawn = {name for row in ROWS for name in row} - EVERYWHERE
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and id(node) not in types:
                module = node.module.split(".")
                if module[0] == "persafl_lit":
                    imported |= {module[1]} if len(module) > 1 else {alias.name for alias in node.names}
        found.update((part, other) for other in imported if other in drawn and part in drawn and other != part)
    return found


def svg() -> str:
    """The picture, the same for the same imports."""
    place = {
        name: (WIDTH * (column + 1) / (len(row) + 1), ROW * (number + 0.5))
        for number, row in enumerate(ROWS)
        for column, name in enumerate(row)
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW * len(ROWS)}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{ROW * len(ROWS)}" fill="white"/>',
    ]
    for part, other in sorted(edges()):
        (x, y), (u, v) = place[part], place[other]
        # An arrow over several rows bends outwards, around the boxes between.
        bend = 0 if v - y <= ROW else (1 if x + u >= WIDTH else -1) * (70 + 22 * (v - y) / ROW)
        lines.append(
            f'<path d="M{x:.0f} {y + HIGH / 2:.0f}Q{(x + u) / 2 + bend:.0f} {(y + v) / 2:.0f} {u:.0f} '
            f'{v - HIGH / 2:.0f}" fill="none" stroke="#555" stroke-opacity="0.6" stroke-width="1.2" '
            f'marker-end="url(#tip)"><title>{escape(part)} imports {escape(other)}</title></path>'
        )
    for name, (x, y) in place.items():
        fill = "#eeeeee" if name in EVERYWHERE else "#d9e8f5"
        lines.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - HIGH / 2:.0f}" width="{BOX}" height="{HIGH}" rx="6" fill="{fill}" '
            'stroke="#336"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" font-size="15" text-anchor="middle">{escape(name)}</text>'
        )
    x, y = WIDTH / 2, ROW * len(ROWS) - 8
    lines.append(
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="12" text-anchor="middle">imported by nearly all parts</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "import_graph.svg").write_text(svg(), encoding="utf-8")
