"""MLflow is imported before the tests begin: within a run, its import counts as time that a store takes to open."""

from __future__ import annotations

from persafl_lit.tracking.store import load_mlflow

load_mlflow()
