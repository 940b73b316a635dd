"""L, sigma_g, gamma_g, G and the gap of a run's own model and data, at its first model.

These are values at one point: lower bounds on constants that hold everywhere, except for quadratics, whose L is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from persafl_lit.common.seeding import rng

if TYPE_CHECKING:
    from persafl_lit.config.compose import Config

CLIENTS, ITERATIONS, DRAWS = 10, 20, 8
"""How many clients are looked at, steps of the power iteration, and batches per client for sigma_g."""


def estimate(config: Config) -> tuple[dict[str, float], str]:
    """(constants, where L comes from)."""
    from persafl_lit.api import quiet_single_threaded_torch, work_of
    from persafl_lit.engine.executors import Worker
    from persafl_lit.learning.evaluation import whole_batches
    from persafl_lit.models.backbone import build_backbone

    with quiet_single_threaded_torch():
        federation = config.federation()
        backbone = build_backbone(config.build("model"), federation, config.seed, config.allow_code)
        worker = Worker(work_of(config, federation, backbone))
        f, w = worker.module.f, worker.module.f.point.clone()
        clients = rng(config.seed, "theory clients").permutation(federation.trained())[:CLIENTS].tolist()
        slopes, values, curvatures, noises = [], [], [], []
        for client in clients:
            chunks = whole_batches(worker.federation, client, max(1, federation.count(client, "train")), config.seed)
            batch = chunks[0][0]
            f.losses.clear()
            slope = f.gradient(w, batch).clone()
            values.append(float(f.losses[-1]))
            slopes.append(slope)
            curvatures.append(largest_curvature(f, w, batch, rng(config.seed, "theory power", client)))
            for drawn in worker.federation.batches(client, "D", 0, DRAWS, config.batch_size, config.seed):
                noises.append(float((f.gradient(w, drawn) - slope).norm()) ** 2)
        mean = sum(slopes[1:], slopes[0].clone()) / len(slopes)
        L = max(curvatures) if federation.smoothness is None else federation.smoothness
        found = {
            "L": L,
            "sigma_g": float(np.sqrt(np.mean(noises) * config.batch_size)),
            "gamma_g": float(np.sqrt(np.mean([float((slope - mean).norm()) ** 2 for slope in slopes]))),
            "G": max(float(slope.norm()) for slope in slopes),
            "gap": float(np.mean(values)),
        }
    if federation.smoothness is not None:
        return found, "known for quadratics"
    return found, f"estimated by power iteration on {len(clients)} clients' data at the first model: a lower bound"


def largest_curvature(f: Any, w: Any, batch: Any, stream: np.random.Generator, iterations: int = ITERATIONS) -> float:
    """|H(w)|, by power iteration: u <- H u / |H u|."""
    u = w.new_tensor(stream.normal(size=len(w)))
    size = 0.0
    for _ in range(iterations):
        u = u / u.norm()
        u = f.hessian_vector(w, u, batch)
        size = float(u.norm())
        if size == 0:
            break
    return size
