"""Shared by all tests: every test runs in a folder of its own, so that no store or checkpoint leaks."""

from __future__ import annotations

import logging

import pytest

from persafl_lit.common.logs import shown_on_stderr


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def sentences_on_stderr():
    """What the package logs is on stderr as commands show it, also where a test calls Python functions."""
    with shown_on_stderr(logging.INFO):
        yield
