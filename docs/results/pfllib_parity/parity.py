"""FedPer, FedRep and Ditto as PFLlib trains and evaluates them, beside persafl_lit: the same split, network, number of
steps and rounds.

    python docs/results/pfllib_parity/parity.py        writes parity.csv beside this file

PFLlib's procedure, read off its public code (clientper.py, clientrep.py, clientditto.py and their servers) and written
here anew as a plain PyTorch loop: all clients in every round; minibatches are consecutive pieces of a shuffled epoch;
the server weighs models by training samples; Ditto trains its personal model before the shared one; every client is
evaluated with its own model right after it received the shared part, without fine-tuning; accuracies are weighted by
test samples. persafl_lit draws every minibatch independently and weighs all clients alike. `loop, unweighted` is the
loop with equal weights, so that this difference can be told from the others.
"""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import torch
from torch import nn

import persafl_lit

CLIENTS, ROUNDS, STEPS, BATCH, ETA, LAM, BODY = 20, 40, 10, 10, 0.05, 1.0, 5
SEEDS = range(5)
SETTINGS = [
    "data=digits",
    "data.classes_per_client=3",
    f"clients={CLIENTS}",
    "model=mlp",
    "model.hidden=[64]",
    "model.dropout=0",
    f"local_steps={STEPS}",
    f"batch_size={BATCH}",
    f"eta={ETA}",
    "schedule=rounds",
    f"schedule.cohort={CLIENTS}",
    f"updates={CLIENTS * ROUNDS}",
    "eval.finetune=none",
    f"eval.every={1e6}",
    "tracking.enabled=false",
    "checkpoint.every=0",
]
METHODS = {"fedper": [], "fedrep": [f"method.body_steps={BODY}"], "ditto": [f"method.lam={LAM}"]}


def held(federation: Any, client: int, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    ((data, _),) = federation.whole(client, split, 10**6)
    return data


class Epochs:
    """Minibatches of a shuffled epoch, one after the other; an incomplete last one is left out."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> None:
        self.x, self.y, self.generator = x, y, generator
        self.left: list[torch.Tensor] = []

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        size = min(BATCH, len(self.y))
        if not self.left:
            order = torch.randperm(len(self.y), generator=self.generator)
            self.left = [piece for piece in order.split(size) if len(piece) == size]
        chosen = self.left.pop()
        return self.x[chosen], self.y[chosen]


def steps(model: nn.Module, parameters: list[nn.Parameter], epochs: Epochs, count: int, pull: Any = None) -> None:
    """Plain SGD on some of a model's parameters; `pull` are the values that Ditto's model is pulled towards."""
    for _ in range(count):
        x, y = epochs.next()
        slopes = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters)
        with torch.no_grad():
            for number, (parameter, slope) in enumerate(zip(parameters, slopes, strict=True)):
                towards = 0 if pull is None else LAM * (parameter - pull[number])
                parameter -= ETA * (slope + towards)


def loop(method: str, federation: Any, network: nn.Module, seed: int, weighted: bool) -> float:
    generator = torch.Generator().manual_seed(seed)
    models = [copy.deepcopy(network) for _ in range(CLIENTS)]
    personal = [copy.deepcopy(network) for _ in range(CLIENTS)]
    epochs = [Epochs(*held(federation, client, "train"), generator) for client in range(CLIENTS)]
    samples = torch.tensor([float(len(one.y)) if weighted else 1.0 for one in epochs])
    weights = samples / samples.sum()
    everything = list(network.parameters())
    shared = everything if method == "ditto" else everything[:-2]  # all but the last layer
    values = [parameter.detach().clone() for parameter in shared]
    for _ in range(ROUNDS):
        for client, model in enumerate(models):
            mine = list(model.parameters())
            receive(mine, values)
            if method == "ditto":
                steps(personal[client], list(personal[client].parameters()), epochs[client], STEPS, values)
                steps(model, mine, epochs[client], STEPS)
            elif method == "fedrep":
                steps(model, mine[-2:], epochs[client], STEPS - BODY)
                steps(model, mine[:-2], epochs[client], BODY)
            else:
                steps(model, mine, epochs[client], STEPS)
        values = [
            sum(
                weight * list(model.parameters())[number].detach()
                for weight, model in zip(weights, models, strict=True)
            )
            for number in range(len(values))
        ]
    right, total = 0.0, 0.0
    for client, model in enumerate(personal if method == "ditto" else models):
        if method != "ditto":
            receive(list(model.parameters()), values)
        x, y = held(federation, client, "test")
        share = float((model(x).argmax(1) == y).double().mean())
        count = len(y) if weighted else 1
        right, total = right + share * count, total + count
    return right / total


@torch.no_grad()
def receive(parameters: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=False):
        parameter.copy_(value)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for method, more in METHODS.items():
        for seed in SEEDS:
            config = persafl_lit.compose([*SETTINGS, f"method={method}", *more, f"seed={seed}"])
            result = persafl_lit.run(config)
            own = result.summary()["models"]["own"]["as_is"]["test"]
            # The same first weights: those of a run that has not moved.
            first = persafl_lit.run(
                [*SETTINGS, "method=fedavg", f"seed={seed}", "eta=1e-30", f"updates={CLIENTS}"]
            ).model
            found = {"persafl_lit": own}
            for name, weighted in (("loop", True), ("loop, unweighted", False)):
                network = copy.deepcopy(first.network)
                found[name] = loop(method, result.federation, network, seed, weighted)
            for implementation, accuracy in found.items():
                rows.append(
                    {"method": method, "seed": seed, "implementation": implementation, "accuracy_test": accuracy}
                )
            print(method, seed, found, flush=True)
    with (Path(__file__).parent / "parity.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
