"""Shared by all tests: every test runs in a folder of its own, so that no store or checkpoint leaks."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path
