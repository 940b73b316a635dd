"""Callbacks: watch a run, or end it early. Any object with some of these methods is one; the base class is for those
who like it.

    class Patience(persafl_lit.Callback):
        def on_evaluation(self, experiment, point):
            if point.accuracy()["val"] > 0.9:
                experiment.stop(point)

    persafl_lit.run(["method=persafl_me"], callbacks=[Patience()])

The loop calls `fabric.call(hook, ...)` with keywords only, so a method may leave out arguments that it does not need. A
callback with `state_dict()` and `load_state_dict(state)` has its state in the run's checkpoints: tensors, numbers,
text, lists and dicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persafl_lit.engine.experiment import Experiment
    from persafl_lit.engine.result import Result
    from persafl_lit.learning.scores import Point
    from persafl_lit.timeline import Job


class Callback:
    """Does nothing at each moment of a run."""

    def on_run_start(self, experiment: Experiment) -> None:
        """The timeline is known, and workers may be training already; `experiment.points` has those from before a
        resume."""

    def on_update(self, experiment: Experiment, job: Job, staleness: int, loss: float) -> None:
        """An update has arrived, and been applied or skipped: `experiment.state` is the server's state after it."""

    def on_evaluation(self, experiment: Experiment, point: Point) -> None:
        """An evaluation is done. It ran beside training: `point.model` and `point.memory` are what was evaluated, and
        `experiment.state` may be ahead. `experiment.stop(point)` ends the run as of this point. Points from before a
        resume are not told again; one at which a callback failed is told again to that callback and to those after
        it."""

    def on_checkpoint(self, experiment: Experiment) -> None:
        """A checkpoint has been written."""

    def on_run_end(self, experiment: Experiment, result: Result) -> None:
        """The run is finished, and its checkpoints are about to be deleted."""

    def on_run_error(self, experiment: Experiment, error: BaseException) -> None:
        """The run ends without a result: interrupted, diverged or failed."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for this callback."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before `on_run_start` of a run that is resumed."""
