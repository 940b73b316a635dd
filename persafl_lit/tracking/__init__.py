"""MLflow tracking. `store` is the only file that imports mlflow; `tracker` hands it over in the background."""

from persafl_lit.tracking.tracker import Tracker
from persafl_lit.tracking.unsent import store_uri, sync

__all__ = ["Tracker", "store_uri", "sync"]
