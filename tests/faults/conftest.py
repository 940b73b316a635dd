"""Shared by the fault tests: one nursery, one empty store to copy, and the count at the end."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from persafl_lit.tracking.store import load_mlflow, open_store
from tests.faults.harness import Nursery, details, survived

load_mlflow()  # as in tests/tracking


@pytest.fixture(scope="session")
def nursery():
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    open_store(f"sqlite:///{folder}/new.db")
    with (
        contextlib.closing(sqlite3.connect(folder / "new.db")) as made,
        contextlib.closing(sqlite3.connect(folder / "empty.db")) as copy,
    ):
        made.backup(copy)
        copy.execute("PRAGMA journal_mode=WAL")
    return folder / "empty.db"


def pytest_terminal_summary(terminalreporter):
    if survived:
        terminalreporter.write_line(f"faults survived: {sum(survived.values())}")
        for kind, count in survived.most_common():
            terminalreporter.write_line(f"  {count:4d}  {kind}")
        for what, count in details.items():
            terminalreporter.write_line(f"{what}: {count}")
