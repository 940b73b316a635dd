"""docs/theory.md says what `persafl theory --json` found, which is kept in docs/theory.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FOUND = json.loads((DOCS / "theory.json").read_text(encoding="utf-8"))
A, B, C = FOUND["studies"]


def slope(study: Any, name: str, digits: int) -> str:
    value, low, high = (f"{study['slopes'][name][key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def row(title: str, *cells: str) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def spans(key: str, form: str) -> list[str]:
    rows = [[found[key] for found in FOUND["rows"] if found["option"] == option] for option in "abc"]
    return [f"{format(min(values), form)} to {format(max(values), form)}" for values in rows]


def phrases() -> Iterator[str]:
    studies = (A, B, C)
    yield row("T", *spans("T", ",d"))
    yield row("bound / measured, tau = 0 .. 10", *spans("ratio", ".3g"))
    yield row("slope in T (theorem: -0.5)", *(slope(study, "T", 3) for study in studies))
    staleness = "what staleness adds: slope in tau (theorem: at most 2)"
    yield row(staleness, *(slope(study, "tau", 2) for study in studies))
    yield row("the same: slope in T (theorem: -1)", *(slope(study, "tau_over_T", 2) for study in studies))
    maml = f"alpha: {slope(B, 'floor_alpha', 2)}, b: {slope(B, 'floor_b', 3)}"
    floors = "slope of the floor (theorem: alpha 2, b -1; nu 2)"
    yield row(floors, "no floor", maml, f"nu: {slope(C, 'floor_nu', 2)}")
    stale = [study["staleness"] for study in studies]
    near = [f"{found['from_the_optimum']:+.2%}".replace("%", " %") for found in stale]
    far = [f"{-found['from_the_start']:.2%}".replace("%", " %") for found in stale]
    yield f"changes the average by {near[0]} and {near[2]}"
    yield f"even gain {far[0]} and {far[2]} from stale reads"
    yield f"there the effects are {near[1]} and a gain of {far[1]}"
    rounder = B["floor"]["smooth_slopes"]
    yield f"the floor goes as alpha^{rounder['alpha']:.2f} / b^{-rounder['b']:.2f}"
    loose = [
        bound / measured
        for key in ("alpha", "b")
        for bound, measured in zip(B["floor"]["bound"][key], B["floor"]["measured"][key], strict=True)
    ]
    yield f"it is {min(loose):.0f} to {max(loose):.0f} times below its bound"
    steps = C["floor"]["inner_steps"]
    yield f"grows by {steps['per_decade']:.1f} per decade of nu"
    yield f"allows {steps['most_per_decade']:.1f}"
    yield f"(slope {C['limit']['slope']:.3f})"
    uneven = A["uneven"]
    *first, last = (f"{100 * share:.0f}" for share in uneven["shares"])
    yield f"their shares are {', '.join(first)} and {last} %"
    yield f"holds at T = {uneven['T'][-1]:,}"
    yield f"{uneven['asynchronous'][-1] / uneven['drawn'][-1]:.0f} times what the drawn schedule gives"
    yield f"it is {uneven['times_the_bound'][-1]:.2f} times the bound"


@pytest.mark.parametrize("phrase", phrases())
def test_the_page_says(phrase: str) -> None:
    assert phrase in " ".join((DOCS / "theory.md").read_text(encoding="utf-8").split())


def test_no_bound_was_exceeded() -> None:
    assert all(found["ratio"] >= 1 for found in FOUND["rows"] if found["conditions_hold"])
    assert all(found["conditions_hold"] for found in FOUND["rows"])
