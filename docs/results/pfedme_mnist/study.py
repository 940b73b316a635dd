"""Which reading of the pFedMe paper gives its Table 1 (MNIST; logistic regression, and one hidden layer)?

    python docs/results/pfedme_mnist/study.py DATA_ROOT mlr     writes readings.csv beside this file
    python docs/results/pfedme_mnist/study.py DATA_ROOT dnn     writes readings_dnn.csv: 100 hidden ReLU units

A free-standing numpy loop, independent of persafl_lit, so that readings which persafl_lit refuses (an inner solver that
is not reset between local steps) can be tried too. The setting of the table: 20 clients with 2 labels each, S = 5
clients a round, R = 20 local rounds, K = 5 inner steps, batches of 20, 800 rounds; logistic regression with
lambda = 15 and inner steps of 0.1.

Varied:
  samples  `disjoint`: no sample belongs to two clients; `shared`: as the published generator dealt them until June 2021
           (https://github.com/CharlieDinh/pFedMe/pull/13 and issue 16 there). It cuts each label into four pieces of
           random size, but its position within the label is a boolean (a left-over of an earlier line), so that every
           piece starts at the first sample of its label: clients with a common label hold the same samples, and what
           one client is tested on is among the training data of others. The sizes of the paper's section 5.1 (1165 to
           3834 training samples) come out exactly.
  pixels   `standard`: each pixel minus its mean, divided by its deviation (what the published generator does);
           `normalised`: all pixels by one mean and one deviation; `unit`: pixels in [0, 1]
  start    of the inner problem: `reset` at w_{i,r} in every local step, as in the paper's Algorithm 1, or `carried`
           over from the step before, as in the published code; `fedavg`: no inner problem, plain SGD
  steps    `same`: eta = 0.005, beta = 1 (the paper's curves); `tuned`: eta = 0.01, beta = 2 (the published command for
           the table; for the hidden layer also lambda = 30 and inner steps of 0.05); for FedAvg eta = 0.005 and 0.02,
           beta = 1
Measured on all clients' test data, weighted by samples, at the end and (`best_...`) at the best of the evaluations,
which is how the published scripts summarise a run:
  global     the shared w
  theta_w    theta_i(w): K inner steps from the shared w on one batch, the paper's definition of the personalised model
  local      w_{i,R}, the client's local model after R local steps from w: what the published code evaluates, because
             its list of personalised parameters aliases the live model, which is overwritten by the local model first
  theta_R    the inner solution of the last local step
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torchvision.datasets import MNIST

CLIENTS, LABELS, COHORT, LOCAL, INNER, BATCH, ROUNDS, EVERY = 20, 2, 5, 20, 5, 20, 800, 20
PIXELS, HIDDEN, CLASSES = 784, 100, 10


class Steps(NamedTuple):
    eta: float
    beta: float
    lam: float = 15.0
    inner: float = 0.1


PFEDME = {
    "mlr": {"same": Steps(0.005, 1.0), "tuned": Steps(0.01, 2.0)},
    "dnn": {"tuned": Steps(0.01, 2.0, lam=30.0, inner=0.05)},
}
FEDAVG = {"mlr": {"same": Steps(0.005, 1.0), "tuned": Steps(0.02, 1.0)}, "dnn": {"tuned": Steps(0.02, 1.0)}}


def pixels(root: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    halves = [MNIST(root, train) for train in (True, False)]
    x = np.concatenate([half.data.numpy().reshape(-1, 784) for half in halves]).astype(np.float32)
    y = np.concatenate([half.targets.numpy() for half in halves])
    if kind == "standard":
        x = (x - x.mean(0)) / (x.std(0) + 0.001)
    elif kind == "normalised":
        x = (x - x.mean()) / x.std()
    else:
        x = x / 255
    return np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1), y  # the last column is the bias


def shared(y: np.ndarray, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """(train, test) indices of each client as the published generator gives them: every piece starts at the first
    sample of its label, at the second where another client had the label before; pieces are cut with numpy's seed 1."""
    cuts = np.random.RandomState(1)
    pieces: list[list[int]] = []
    for label in range(10):
        left, sizes = int((y == label).sum()), []
        for _ in range(3):
            sizes.append(int(cuts.randint(left // 5, left // 2)))
            left -= sizes[-1]
        pieces.append([*sizes, left])
    in_turn = iter([sizes[turn] for turn in range(4) for sizes in pieces])
    seen: set[int] = set()
    parts = []
    for client in range(CLIENTS):
        held = []
        for label in (client % 10, (client + 1) % 10):
            held.append(np.flatnonzero(y == label)[int(label in seen) : next(in_turn)])
            seen.add(label)
        mine = rng.permutation(np.concatenate(held))
        parts.append((mine[: len(mine) * 3 // 4], mine[len(mine) * 3 // 4 :]))
    return parts


def deal(y: np.ndarray, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """(train, test) indices of each client: labels u and u + 1 mod 10, shares of random size, three quarters for
    training."""
    held: list[list[np.ndarray]] = [[] for _ in range(CLIENTS)]
    for label in range(10):
        owners = [client for client in range(CLIENTS) if (label - client) % 10 < LABELS]
        samples = rng.permutation(np.flatnonzero(y == label))
        cuts = np.cumsum(rng.dirichlet([10] * len(owners)) * len(samples)).astype(int)[:-1]
        for client, piece in zip(owners, np.split(samples, cuts), strict=True):
            held[client].append(piece)
    shuffled = [rng.permutation(np.concatenate(pieces)) for pieces in held]
    return [(mine[: len(mine) * 3 // 4], mine[len(mine) * 3 // 4 :]) for mine in shuffled]


def start_of(model: str, rng: np.random.Generator) -> np.ndarray:
    """PyTorch's usual start: uniform within 1 / sqrt(fan-in). A hidden layer's matrix and the one after it lie one
    after the other in a vector; the last row of each is its bias."""
    if model == "mlr":
        return rng.uniform(-1, 1, (PIXELS + 1, CLASSES)).astype(np.float32) / np.float32(PIXELS**0.5)
    first = rng.uniform(-1, 1, (PIXELS + 1) * HIDDEN) / PIXELS**0.5
    return np.concatenate([first, rng.uniform(-1, 1, (HIDDEN + 1) * CLASSES) / HIDDEN**0.5]).astype(np.float32)


def layers(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cut = (PIXELS + 1) * HIDDEN
    return w[:cut].reshape(PIXELS + 1, HIDDEN), w[cut:].reshape(HIDDEN + 1, CLASSES)


def scores_of(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    if w.ndim == 2:
        return x @ w
    first, second = layers(w)
    return np.maximum(x @ first, 0) @ second[:-1] + second[-1]


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    scores = scores_of(w, x)
    scores -= scores.max(1, keepdims=True)
    p = np.exp(scores)
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    if w.ndim == 2:
        return x.T @ p / len(y)
    p /= len(y)
    first, second = layers(w)
    hidden = np.maximum(x @ first, 0)
    back = (p @ second[:-1].T) * (hidden > 0)
    return np.concatenate([(x.T @ back).ravel(), (hidden.T @ p).ravel(), p.sum(0)])


def inner(theta: np.ndarray, w: np.ndarray, x: np.ndarray, y: np.ndarray, steps: Steps) -> np.ndarray:
    """K steps on f(theta) + lam/2 |theta - w|^2."""
    for _ in range(INNER):
        theta = theta - steps.inner * (gradient(theta, x, y) + steps.lam * (theta - w))
    return theta


def local(
    w: np.ndarray, x: np.ndarray, y: np.ndarray, steps: Steps, start: str, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """R local steps of pFedMe: (w_{i,R}, the last theta); of FedAvg: the local model twice."""
    mine = theta = w
    for _ in range(LOCAL):
        batch = rng.integers(len(y), size=BATCH)
        if start == "fedavg":
            mine = theta = mine - steps.eta * gradient(mine, x[batch], y[batch])
        else:
            theta = inner(theta if start == "carried" else mine, mine, x[batch], y[batch], steps)
            mine = mine - steps.eta * steps.lam * (mine - theta)
    return mine, theta


def measure(
    w: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    parts: list[tuple[np.ndarray, np.ndarray]],
    steps: Steps,
    start: str,
    rng: np.random.Generator,
) -> dict[str, float]:
    hits = dict.fromkeys(("global", "theta_w", "local", "theta_R"), 0)
    for train, test in parts:
        batch = train[rng.integers(len(train), size=BATCH)]
        mine, theta = local(w, x[train], y[train], steps, start, rng)
        for name, model in {
            "global": w,
            "theta_w": inner(w, w, x[batch], y[batch], steps),
            "local": mine,
            "theta_R": theta,
        }.items():
            hits[name] += int((scores_of(model, x[test]).argmax(1) == y[test]).sum())
    return {name: count / sum(len(test) for _, test in parts) for name, count in hits.items()}


def study(
    x: np.ndarray, y: np.ndarray, model: str, samples: str, start: str, steps: Steps, seed: int
) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    parts = {"disjoint": deal, "shared": shared}[samples](y, rng)
    w = start_of(model, rng)
    measured = []
    for number in range(1, ROUNDS + 1):
        cohort = rng.choice(CLIENTS, COHORT, replace=False)
        weights = np.array([len(parts[client][0]) for client in cohort], dtype=np.float32)
        models = [local(w, x[parts[client][0]], y[parts[client][0]], steps, start, rng)[0] for client in cohort]
        mean = np.tensordot(weights / weights.sum(), np.stack(models), 1)
        w = ((1 - steps.beta) * w + steps.beta * mean).astype(np.float32)
        if number % EVERY == 0:
            measured.append(measure(w, x, y, parts, steps, start, rng))
    return measured[-1] | {f"best_{name}": max(found[name] for found in measured) for name in measured[-1]}


READINGS = {
    "mlr": [(kind, "disjoint") for kind in ("standard", "normalised", "unit")] + [("standard", "shared")],
    "dnn": [("standard", "shared"), ("standard", "disjoint")],
}
SEEDS = {"mlr": 3, "dnn": 1}


def rows(root: str, model: str) -> Iterator[dict[str, str | float]]:
    for seed in range(SEEDS[model]):
        for kind, samples in READINGS[model]:
            x, y = pixels(root, kind)
            for start in ("reset", "carried", "fedavg"):
                for name, steps in (FEDAVG if start == "fedavg" else PFEDME)[model].items():
                    found = study(x, y, model, samples, start, steps, seed)
                    yield {"samples": samples, "pixels": kind, "start": start, "steps": name, "seed": seed, **found}


def main(root: str, model: str) -> None:
    name = {"mlr": "readings.csv", "dnn": "readings_dnn.csv"}[model]
    with (Path(__file__).parent / name).open("w", newline="") as file:
        for number, row in enumerate(rows(root, model)):
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if number == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
