"""What a run ran on: recorded so that it can be repeated."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

PACKAGES = ("persafl_lit", "torch", "torchvision", "lightning", "mlflow", "numpy", "omegaconf", "scikit-learn", "ray")


def environment() -> dict[str, Any]:
    """Versions of Python, the system and the packages that a result depends on."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": _versions(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> dict[str, str]:
    """MLflow's tag for the commit of the folder that the run was started in; none where there is no git."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"mlflow.source.git.commit": done.stdout.strip()}
