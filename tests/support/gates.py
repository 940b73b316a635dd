"""A gate at which a run waits, so that a test can kill or signal it there, however fast the machine is.

    gate = Gate(tmp_path / "gate", checkpoints=2)
    process = subprocess.Popen(["persafl", "run", *CALLBACK, ...], env=os.environ | gate.environment)
    gate.reached(process)        # the run has written its second checkpoint, and waits
    process.kill()

Without the variables in its environment a run passes.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.waiting import until

ROOT = Path(__file__).parent.parent.parent
CALLBACK = ["callbacks=[tests.support.gates.Waits]", "allow_code=true"]
"""Overrides of a run that has a gate."""


class Gate:
    """The test's side. Every process waits at its own checkpoint of this number, until the gate is opened."""

    def __init__(self, folder: Path, checkpoints: int = 1) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.environment = {"PYTHONPATH": str(ROOT), "GATE": str(folder), "GATE_CHECKPOINTS": str(checkpoints)}

    def waiting(self) -> list[int]:
        """The processes at the gate."""
        return [int(file.name) for file in self.folder.iterdir() if file.name.isdigit()]

    def reached(self, process=None, count: int = 1) -> list[int]:
        """Wait until so many processes are at the gate."""
        return until(lambda: found if len(found := self.waiting()) >= count else None, process)

    def open(self) -> None:
        (self.folder / "open").touch()


class Waits:
    """The run's side: a callback."""

    def __init__(self) -> None:
        self.left = int(os.environ.get("GATE_CHECKPOINTS", 0))

    def on_checkpoint(self) -> None:
        self.left -= 1
        if self.left == 0:
            folder = Path(os.environ["GATE"])
            (folder / str(os.getpid())).touch()
            until((folder / "open").exists)
