"""Records of runs, written by hand."""

from __future__ import annotations

from persafl_lit.report.record import Record


def record(
    method="persafl_me",
    seed=0,
    val=(0.2, 0.8),
    test=(0.1, 0.7),
    times=None,
    status="FINISHED",
    error=None,
    metric="accuracy",
    **config,
):
    """A run by hand; config keys are written with __ for dots."""
    values = {
        "method.name": method,
        "seed": seed,
        "eta": 0.01,
        "eval.finetune.name": "sgd",
        "eval.finetune.steps": 10,
        "eval.finetune.lr": None,
    }
    values |= {key.replace("__", "."): value for key, value in config.items()}
    times = list(range(len(test))) if times is None else times
    curves = {
        "sim_time": times,
        "updates": [10 * time for time in times],
        f"{metric}.val": list(val),
        f"{metric}.test": list(test),
    }
    run_id = "-".join(map(str, (method, seed, status, *config.values())))
    return Record(run_id, status, values, error, curves=curves)
