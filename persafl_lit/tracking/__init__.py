"""MLflow tracking. `store` is the only file that imports mlflow; `tracker` hands it over in the background."""

from persafl_lit.tracking.location import store_uri
from persafl_lit.tracking.outbox import sync
from persafl_lit.tracking.tracker import Tracker

__all__ = ["Tracker", "store_uri", "sync"]
