"""An objective in ten lines: sharpness-aware local steps (SAM), with `radius` as a key.

python examples/own_objective.py
cd examples && persafl run method=fedasync method.objective=own_objective.Sam method.radius=0.1 allow_code=true
"""

import sys
from dataclasses import dataclass

import persafl_lit


@dataclass(frozen=True)
class Sam(persafl_lit.Objective):
    """grad f(w + radius * g / |g|; D) with g = grad f(w; D)."""

    radius: float = 0.05
    """How far to look uphill."""
    moves = True  # it takes gradients elsewhere than at step.w
    cost = 2  # gradients per local step

    def gradient(self, f, step):
        uphill = f.gradient(step.w, step.batches[0])
        return f.gradient(step.w + self.radius * uphill / uphill.norm().clamp(min=1e-12), step.batches[0])


if __name__ == "__main__":
    settings = ["method=fedasync", "clients=10", "horizon=20", "tracking.experiment=sam", *sys.argv[1:]]
    result = persafl_lit.run(settings, objective=Sam(radius=0.1))
    print(result.config.label(), result.accuracy["test"])
