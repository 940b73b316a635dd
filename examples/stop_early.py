"""A callback that ends a run when the validation accuracy has not risen for some evaluations; it survives `--resume`.

python examples/stop_early.py
cd examples && persafl run "callbacks=[{name: stop_early.Patience, evaluations: 3}]" allow_code=true
"""

import sys

import persafl_lit


class Patience(persafl_lit.Callback):
    def __init__(self, evaluations: int = 2) -> None:
        self.evaluations = evaluations
        self.best, self.since = 0.0, 0

    def on_evaluation(self, experiment, point):
        accuracy = point.accuracy()["val"]
        self.since = 0 if accuracy > self.best else self.since + 1
        self.best = max(self.best, accuracy)
        if self.since >= self.evaluations:
            experiment.stop(point)

    def state_dict(self):
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state):
        self.best, self.since = state["best"], state["since"]


if __name__ == "__main__":
    settings = [
        "method=fedasync",
        "clients=10",
        "horizon=200",
        "eval.every=5",
        "tracking.experiment=patience",
        *sys.argv[1:],
    ]
    result = persafl_lit.run(settings, callbacks=[Patience(evaluations=3)])
    print(*result.notes, f"best validation accuracy {max(result.curves()['accuracy.val']):.4f}")
