"""Where runs are tracked."""

from __future__ import annotations

import os
from pathlib import Path

STORE = Path("mlruns")
SQLITE = "sqlite:///"


def store_uri(uri: str | None) -> str:
    """The tracking URI: as configured, else the environment's, else our sqlite store. Files are named in full, because
    MLflow keeps connections by URI and would take another folder's store for the same."""
    chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{STORE}/mlflow.db"
    return SQLITE + str(Path(chosen.removeprefix(SQLITE)).absolute()) if chosen.startswith(SQLITE) else chosen
