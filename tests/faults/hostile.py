"""Odd values for every parser, and the law that each case must keep: success or one sentence, soon, and no file elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import persafl_lit.api  # what commands import late is no part of a case's time
import persafl_lit.engine.progress  # noqa: F401
from persafl_lit import compose
from persafl_lit.config.compose import GROUPS, choices
from persafl_lit.errors import PersaflError

NORMAL, LONG = 200, 2500
SIZES = pytest.mark.parametrize("cases", [NORMAL, pytest.param(LONG, marks=pytest.mark.faults)], ids=["normal", "long"])
"""The same law over a few hundred cases, the same in every run, and over thousands of new ones under the marker `faults`."""
DEADLINE, HANG = 2.0, 60
CANARY = os.environ["PERSAFL_CANARY"] = "canary-that-must-not-sing"

BOMB = "[&a [x,x,x,x,x,x,x,x,x], &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b,*b,*b,*b], &d [*c,*c,*c,*c,*c,*c,*c,*c,*c], [*d,*d,*d,*d,*d]]"
ODD_TEXTS = [
    *(
        "",
        " ",
        "~",
        "null",
        "nan",
        ".nan",
        ".inf",
        "-.inf",
        "1e300",
        "-1e300",
        "1e-300",
        "-0.0",
        "1_000",
        "0x1f",
        "0b",
        "0o9",
        "1:30:00",
        "2024-01-01",
    ),
    *(
        "yes",
        "true",
        "on",
        "[",
        "{",
        "[]",
        "{}",
        "{a: 1}",
        "[1, [2, [3]]]",
        "[" * 300,
        "{a: " * 300,
        "'",
        '"',
        "a: b",
        "- x",
        "? x",
        "%TAG ! x",
        "---",
    ),
    *(
        "--- a\n--- b",
        "...",
        "\x00",
        "\x1b[31mred",
        "\ud800",
        "\u202e",
        "\u2028",
        "💥" * 50,
        "9" * 5000,
        "-" + "9" * 400,
        "1e999999",
        "x" * 20_000,
    ),
    *(
        "../../x",
        "/etc/passwd",
        "/dev/zero",
        "/dev/stdin",
        ".",
        "..",
        "~root",
        "<script>alert(1)</script>",
        "=1+1",
        "a\r\nb",
        "???",
        "cohort",
    ),
    *(
        "os.system",
        "${oc.env:PERSAFL_CANARY}",
        "${PERSAFL_CANARY}",
        "${",
        "a${b}c",
        "${oc.decode:x}",
        "\\${x}",
        BOMB,
        "&a [*a]",
        "*x",
        "<<: {a: 1}",
    ),
    *(
        "!!python/object/apply:os.system ['touch pwned']",
        "!!python/name:os.system",
        "!!python/object/apply:pathlib.Path ['x']",
        "!x y",
        "!<tag:x> y",
    ),
    *("!!int ''", "!!float x", "!!bool x", "!!timestamp x", "!!binary x", "!!set {a}", "!!omap x"),
]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.text(alphabet="[]{}:,&*!|>'\"%@`#-?0123456789.eE_+ $~=<\n", max_size=30),
    st.sampled_from(ODD_TEXTS),
)
ODD_NUMBERS = [
    *(0, 1, -1, 2, 3.0, 1.5, 10**6, 10**9, 10**12, 10**15, 10**18, 10**19, 10**400, 2**63, -(2**63)),
    *(1e-300, 1e-12, 1e17, 1e18, 1e19, 1e300, 5e-324, math.nan, math.inf, -math.inf),
]
NUMBERS = st.one_of(st.sampled_from(ODD_NUMBERS), st.floats(), st.integers(-(10**30), 10**30), st.integers(0, 50))
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
TREES = st.recursive(
    PLAIN, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)), max_leaves=6
)
CHOICES = {key: sorted(choices(folder)) for key, folder in GROUPS.items()}
KEYS = sorted(
    {key for group, names in CHOICES.items() for name in names for key in compose({group: name}).flat()}
    | set(GROUPS)
    | {"experiment", "eval"}
)
NEAR = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(KEYS),
    st.tuples(
        st.sampled_from(KEYS),
        st.sampled_from([".", ".x", ".name", "s", " ", "._target_", ".__class__", "=", "[0]", "\n"]),
    ).map("".join),
    st.sampled_from(KEYS).map(lambda key: key[:-1]),
    TEXTS,
)


def each(cases, strategy, law):
    """The law, over `cases` cases, each in at most DEADLINE seconds of this process (a busy machine is no fault of the case)."""

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=cases <= NORMAL,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(case):
        start = time.process_time()
        with no_hang():
            law(case)
        assert time.process_time() - start < DEADLINE, "that took too long"

    keep()


def lawful(action):
    """What an action gives, or None if it was refused as it should be."""
    try:
        return action()
    except PersaflError as error:
        check_sentence(str(error))
        assert error.exit_code in (2, 3)
        return None


def check_sentence(text):
    assert 10 < len(text) <= 610
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028]", text), (
        "one line, and nothing that a terminal would obey"
    )
    assert "Traceback" not in text
    assert CANARY not in text, "nothing is filled in from the environment"


class Hang(BaseException):
    """Not an Exception: nobody may swallow it."""


@contextlib.contextmanager
def no_hang(seconds=HANG):
    def ring(number, frame):
        raise Hang(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def files_under(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*")}


def str_of(number):
    return "1" + "0" * 400 if number == 10**400 else str(number)


def damaged(valid):
    """A valid file with bytes changed, cut out or put in."""
    edit = st.tuples(st.integers(0, len(valid)), st.integers(0, 6), st.binary(max_size=6))
    return st.lists(edit, min_size=1, max_size=4).map(lambda edits: edited(valid, edits))


def edited(data, edits):
    for place, cut, new in edits:
        data = data[:place] + new + data[place + cut :]
    return data
