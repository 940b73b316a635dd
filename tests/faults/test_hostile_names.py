"""Names that are markup, formulas or paths: text in every report, and never a file outside the folder that the user named."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import strategies as st

from persafl_lit.cli import main
from persafl_lit.cli.tracking import folder_name
from persafl_lit.common import limits
from persafl_lit.common.csv_table import to_csv
from persafl_lit.report import write_report
from persafl_lit.report.chart import file_stem
from persafl_lit.report.content import content_of
from persafl_lit.report.page import SCRIPT, html_page, markdown_page
from persafl_lit.report.record import Record
from tests.faults.hostile import CHOICES, KEYS, NUMBERS, PLAIN, SIZES, TEXTS, check_sentence, each, files_under, str_of

SING = "document.title='pwned';document.body.id='pwned'"
INJECTIONS = [
    f"<script>{SING}</script>",
    f'<img src=x onerror="{SING}">',
    f'"><svg onload={SING}>',
    f"</script><script>{SING}</script>",
    f'<a href="javascript:{SING}">x</a>',
    f"' onmouseover='{SING}",
    "<!--",
    "]]>",
    "&lt;script&gt;",
    "a|b`c*d_e_~f~[g](h)",
    '=HYPERLINK("http://x")',
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(1)",
    "\tx",
    "a\rb",
    "# heading",
    "- item",
    "1. item",
    "---",
    "%{x}<extra></extra>",
    "$\\frac{1}{0}$",
    "\u202e\u2028",
]
NAMES = st.one_of(st.sampled_from(INJECTIONS), TEXTS, st.tuples(st.sampled_from(INJECTIONS), TEXTS).map("".join))


def record(name, seed=0, status="FINISHED", **more):
    config = {
        "method.name": name,
        "seed": seed,
        "method.note": more.get("note", name),
        "data.name": more.get("data", name),
        "schedule.name": name,
    }
    config |= more.get("config", {})
    curves = {"sim_time": [0.0, 1.0], "updates": [0, 10], "accuracy.val": [0.1, 0.8], "accuracy.test": [0.1, 0.7]}
    summary = {"beside": {name: {"test": 0.5}}, "holdout": {"clients": 0}}
    return Record(
        f"run {name}",
        status,
        config,
        f"Boom: {name}",
        summary,
        curves,
        [{"client": 0, "arrivals": 3, "test_accuracy": 0.5}],
    )


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.names, self.scripts, self._script = [], set(), [], False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.names |= {name for name, _ in attributes}
        self._script = tag == "script"

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts.append(data)


ELEMENTS = {
    "html",
    "head",
    "meta",
    "title",
    "link",
    "style",
    "body",
    "h1",
    "h2",
    "h3",
    "p",
    "noscript",
    "div",
    "figure",
    "figcaption",
    "img",
    "table",
    "thead",
    "tbody",
}
ELEMENTS |= {"tr", "th", "td", "ul", "li", "script", "fieldset", "legend", "label", "input", "span"}
ATTRIBUTES = {
    "lang",
    "charset",
    "http-equiv",
    "content",
    "name",
    "rel",
    "href",
    "class",
    "id",
    "type",
    "tabindex",
    "alt",
    "src",
    "data-plot",
    "data-title",
    "data-caption",
    "value",
    "checked",
    "autocomplete",
}


@SIZES
def test_whatever_runs_are_called_a_page_has_our_elements_and_scripts_only(cases, monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")

    def law(case):
        title, name, note, other = case
        runs = [record(name, note=note), record(name, 1, note=other), record(other), record(other, 2, "FAILED")]
        content = content_of(runs, title)
        page = html_page(content, {})
        seen = Page(page.encode("utf-8", "replace").decode())
        assert set(seen.tags) <= ELEMENTS
        assert seen.names <= ATTRIBUTES
        assert [text for text in seen.scripts if text.strip()][1:] == ["/* plotly */", SCRIPT]
        json.loads(seen.scripts[0])
        check_markdown(markdown_page(content, {}))
        for file, text in content.files.items():
            if file.endswith(".csv"):
                check_csv(text)
        assert all(Path(name).name == name and not name.startswith(".") for name in content.files)

    each(cases, st.tuples(NAMES, NAMES, NAMES, NAMES), law)


def check_markdown(page):
    """Blocks are ours, no tag is open, and each table has as many cells in every row."""
    assert "<" not in page
    for block in page.strip().split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("| "):
            assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines}) == 1
            assert re.fullmatch(r"\|( -{3}:? \|)+", lines[1])
        elif not lines[0].startswith(("#", "- ", "![")):
            assert len(lines) == 1, "a text never becomes two blocks"
    assert not re.search(r"(?<!\\)(?:\\\\)*`", page)
    assert not re.search(r"(?<![\\!\w])(?:\\\\)*\[", page)


def check_csv(text):
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert len({len(row) for row in rows}) <= 1
    for cell in (cell for row in rows for cell in row):
        assert cell[:1] not in ("=", "+", "-", "@", "\t", "\r", "\n") or is_number(cell), cell


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_a_number_in_a_table_stays_a_number_and_a_formula_becomes_text():
    assert to_csv([{"a": -0.5, "b": "-0.5", "c": "=1+1", "d": "x\ry"}], ["a"]) == 'a,b,c,d\n-0.5,-0.5,\'=1+1,"x\ny"\n'


@pytest.mark.slow
def test_a_browser_runs_nothing_that_a_name_holds(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium")
    runs = [
        record(name, seed, note=note, data=INJECTIONS[1])
        for name in INJECTIONS[:5]
        for seed in (0, 1)
        for note in (INJECTIONS[1], INJECTIONS[3])
    ]
    write_report(runs, INJECTIONS[0], tmp_path / "out")
    report = tmp_path / "out" / "report.html"
    live = tmp_path / "live.html"
    live.write_text(f"<html><body>{INJECTIONS[1]}</body></html>")
    unguarded = (
        tmp_path / "unguarded.html"
    )  # the escaping alone must do, also where a browser does not know the page's policy
    unguarded.write_text(re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", report.read_text()))

    def dom(path):
        options = "--headless --no-sandbox --disable-gpu --dump-dom --virtual-time-budget=5000"
        command = [chromium, *options.split(), f"--user-data-dir={tmp_path / 'profile'}"]
        return subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout

    assert 'id="pwned"' in dom(live), "the injection works where nothing stops it"
    for path in (report, unguarded):
        found = dom(path)
        assert 'id="pwned"' not in found
        assert "<title>pwned" not in found
        assert "js-plotly-plot" in found, "our own script has run"
        assert html.escape(INJECTIONS[0], quote=False) in found, "and the name is there to be read"
    assert files_under(tmp_path / "out") <= {path.name for path in (tmp_path / "out").iterdir()}, "no folder within"


# -- paths ------------------------------------------------------------------------------------------------------------


@SIZES
def test_any_name_gives_a_file_name_within_its_folder(cases, tmp_path):
    def law(name):
        for made in (folder_name(name), file_stem(name)):
            inside = (tmp_path / made).resolve()
            assert inside.parent == tmp_path
            assert made not in ("", ".", "..")
            assert not made.startswith(".")
            assert "/" not in made
            assert "\0" not in made

    paths = st.sampled_from(
        [
            "../../x",
            "..",
            ".",
            "/",
            "/etc/passwd",
            "a/../../b",
            "....//x",
            ".hidden",
            "..\\x",
            "\0",
            "~",
            "x" * 300,
            "C:\\x",
            "%2e%2e%2f",
        ]
    )
    each(cases, st.one_of(paths, NAMES, st.text(alphabet="./\\~", max_size=8)), law)


@pytest.mark.parametrize("target", ["..", ".", "../../x", "/", "/etc", "a/../../b", ".hidden"])
def test_a_report_of_an_experiment_named_like_a_path_stays_in_reports(target, tmp_path, monkeypatch, capsys):
    """The store is asked by that name, and may well have it."""
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    store = type(
        "Store", (), {"records": lambda self, name: [record("x")], "keep_report": lambda self, name, folder: None}
    )()
    monkeypatch.setattr("persafl_lit.tracking.store.open_store", lambda uri: store)
    assert main(["report", target, "--uri", "sqlite:///x.db"]) == 0
    made = files_under(tmp_path)
    assert "a/b/reports" in made
    assert all(path in ("a", "a/b") or path.startswith("a/b/reports") for path in made)
    assert not files_under(inside / "reports") & {"report.html"}, "a folder of its own within reports/"


@pytest.mark.parametrize("name", ["x.jpg", "x.exe", "x.html", "x.png.sh"])
def test_a_picture_has_a_format_that_can_be_drawn(name, capsys, tmp_path):
    assert main(["timeline", "clients=3", "horizon=10", "--png", name]) == 2
    assert "pictures are png, svg, pdf" in capsys.readouterr().err
    assert not files_under(tmp_path)


@pytest.mark.parametrize(
    ("name", "magic"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml"), ("x.PDF", b"%PDF"), ("plain", b"\x89PNG")]
)
def test_a_picture_is_what_its_name_says(name, magic, tmp_path):
    assert main(["timeline", "clients=3", "horizon=10", "--png", name]) == 0
    assert (tmp_path / name).read_bytes().startswith(magic)


COMMON = [
    "tracking.enabled=false",
    "executor=serial",
    "data=quadratic",
    "clients=3",
    "data.dimension=2",
    "updates=2",
    "local_steps=2",
    "checkpoint.dir=kept",
]


@SIZES
def test_commands_end_with_a_result_or_a_sentence_and_write_where_they_were_told(cases, tmp_path, monkeypatch, capsys):
    """Whole commands, in a folder two levels down: nothing appears above it, and no exception comes out."""
    monkeypatch.setattr(limits, "MOST_VISITS", 2000)
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    (inside / "out").mkdir()
    monkeypatch.chdir(inside)
    paths = st.sampled_from(
        [
            "out/x",
            "out",
            "",
            ".",
            "missing/x",
            "out/../out/y",
            "x" * 300,
            "out/\n",
            "out/é",
            "/dev/null",
            "out/x.pdf",
            "out/x.png.",
            "/proc/x",
        ]
    )
    safe = [
        key
        for key in KEYS
        if key.split(".")[0]
        not in ("workers", "executor", "checkpoint", "tracking", "accelerator", "devices", "experiment")
    ]
    quick = NUMBERS.filter(
        lambda number: not 50 < abs(number) < 10**6
    )  # a thousand steps are no hang: they were asked for
    override = st.tuples(st.sampled_from(safe), st.one_of(quick.map(str_of), TEXTS)).map("=".join)
    choice = st.tuples(st.sampled_from(["method", "schedule", "delays", "eval.finetune"]), st.integers(0, 20)).map(
        lambda both: f"{both[0]}={CHOICES[both[0]][both[1] % len(CHOICES[both[0]])]}"
    )
    flags = st.one_of(
        st.just([]), paths.map(lambda path: ["--csv", path]), paths.map(lambda path: ["--save-model", path])
    )
    before = files_under(tmp_path)

    def law(case):
        overrides, flag = case
        command = "run" if "--csv" not in flag else "timeline"
        with pytest.MonkeyPatch.context() as quiet:
            quiet.setattr("sys.stdin", io.StringIO())
            try:
                code = main([command, *COMMON, *overrides, *flag])
            except SystemExit as error:  # argparse's own
                code = error.code
        said = capsys.readouterr().err
        assert code in (0, 2, 3), said
        assert "Traceback" not in said
        if code:
            check_sentence(said.strip().splitlines()[-1])

    each(cases, st.tuples(st.lists(st.one_of(override, choice), max_size=3), flags), law)
    assert all(path in before or path.startswith(("a/b/out", "a/b/kept")) for path in files_under(tmp_path))


@pytest.mark.parametrize("folder", ["x" * 300, "afile", "afile/x"])
@pytest.mark.parametrize(
    "command",
    [
        ["run", "data=mnist", "data.root={}"],
        ["data", "mnist", "data.root={}"],
        ["run", "updates=1", "checkpoint.dir={}"],
    ],
)
def test_a_folder_that_cannot_be_is_a_sentence(folder, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("persafl_lit.data.download._sources", lambda *rest: [])
    (tmp_path / "afile").write_text("")
    tracking = [] if command[0] == "data" else ["tracking.enabled=false", "executor=serial", "clients=3"]
    assert main([text.format(folder) for text in command] + tracking) == 2
    check_sentence(capsys.readouterr().err.strip().splitlines()[-1])
    assert files_under(tmp_path) == {"afile"}


def test_values_of_every_kind_are_drawn():
    """The strategies reach what they are meant to reach; else the laws above say little."""
    assert {"schedule.tau", "data.root", "eval.finetune.lr", "model.hidden", "delays.path"} <= set(KEYS)
    seen = []
    each(200, PLAIN, seen.append)
    assert any(isinstance(value, float) and value != value for value in seen)
    assert any(isinstance(value, str) and "${" in value for value in seen)
