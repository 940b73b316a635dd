"""The limit that runs are measured against: tight PyTorch loops of the same arithmetic, in `processes` processes with
one thread each. No federation, no server, no data loading: batches lie ready in memory.

`plain` is the network as one would write it: NCHW, ReLU before max-pooling. `ours` has our kernels' layout: weights and
inputs channels_last, max-pooling before ReLU.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from persafl_lit.models.networks import Torchvision

BATCH, STEPS, INNER, LAM, ALPHA, ETA = 32, 10, 10, 25.0, 0.01, 0.01
Gradient = Callable[[int], list[Tensor]]


def cnn2(layout: str) -> nn.Sequential:
    """The paper's network for MNIST, 582,026 parameters."""
    relu_pool = [nn.ReLU(), nn.MaxPool2d(2)] if layout == "plain" else [nn.MaxPool2d(2), nn.ReLU()]
    layers = [
        nn.Conv2d(1, 32, 5),
        *relu_pool,
        nn.Conv2d(32, 64, 5),
        *relu_pool,
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(1024, 512),
        nn.ReLU(),
    ]
    network = nn.Sequential(*layers, nn.Dropout(0.25), nn.Linear(512, 10))
    return network if layout == "plain" else network.to(memory_format=torch.channels_last)


def logistic() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Loop:
    """Local steps of one method, over and over."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...], layout: str) -> None:
        self.network = network.train()
        self.parameters = list(network.parameters())
        self.batches = [(torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))) for _ in range(3 * STEPS)]
        if layout == "ours":
            self.batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in self.batches]

    def loss(self, batch: int) -> Tensor:
        inputs, labels = self.batches[batch % len(self.batches)]
        return nn.functional.cross_entropy(self.network(inputs), labels)

    def gradient(self, batch: int) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(batch), self.parameters))

    def move(self, direction: list[Tensor], size: float) -> None:
        torch._foreach_add_(self.parameters, direction, alpha=size)

    @torch.no_grad()
    def step(self, method: str, q: int) -> int:
        """One local step; returns the gradient evaluations it took."""
        with torch.enable_grad():
            if method == "fedasync":
                direction, count = self.gradient(q), 1
            elif method == "persafl_maml":
                direction, count = self.maml(q), 4
            else:
                direction, count = self.moreau(q), INNER
        self.move(direction, -ETA)
        return count

    def maml(self, q: int) -> list[Tensor]:
        """(I - alpha H(w; D'')) grad f(w - alpha grad f(w; D'); D), the product by double backward."""
        start = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            self.move(self.gradient_at(3 * q), -ALPHA)
        u = self.gradient_at(3 * q + 1)
        self.restore(start)
        slopes = torch.autograd.grad(self.loss(3 * q + 2), self.parameters, create_graph=True)
        product = torch.autograd.grad(sum((s * v).sum() for s, v in zip(slopes, u, strict=True)), self.parameters)
        return list(torch._foreach_sub(u, list(product), alpha=ALPHA))

    def moreau(self, q: int) -> list[Tensor]:
        """lam (w - theta), theta after gradient steps on f + lam/2 |theta - w|^2."""
        start = [p.detach().clone() for p in self.parameters]
        for _ in range(INNER):
            slope = self.gradient_at(q)
            with torch.no_grad():
                torch._foreach_add_(slope, torch._foreach_sub(self.parameters, start), alpha=LAM)
                self.move(slope, -1 / (LAM + 10))
        with torch.no_grad():
            direction = torch._foreach_mul(torch._foreach_sub(start, self.parameters), LAM)
        self.restore(start)
        return list(direction)

    def gradient_at(self, batch: int) -> list[Tensor]:
        with torch.enable_grad():
            return self.gradient(batch)

    @torch.no_grad()
    def restore(self, start: list[Tensor]) -> None:
        torch._foreach_copy_(self.parameters, start)


def resnet18(layout: str) -> nn.Module:
    """torchvision's, with BatchNorm, for MNIST."""
    network = Torchvision("resnet18").network((1, 28, 28), 10)
    return network if layout == "plain" else network.to(memory_format=torch.channels_last)


def make(model: str, layout: str) -> Loop:
    if model == "resnet18":
        return Loop(resnet18(layout), (1, 28, 28), layout)
    return Loop(logistic(), (1, 8, 8), "plain") if model == "logistic" else Loop(cnn2(layout), (1, 28, 28), layout)


def _work(model: str, method: str, layout: str, wall_seconds: float, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    loop, count, q = make(model, layout), 0, 0
    loop.step(method, 0)
    barrier.wait()
    start = time.perf_counter()
    while time.perf_counter() < start + wall_seconds:
        count += loop.step(method, q)
        q += 1
    results.put(count / (time.perf_counter() - start))


def evaluations_per_second(model: str, method: str, layout: str, processes: int, wall_seconds: float = 15.0) -> float:
    """Of all processes together, at the same time."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=_work, args=(model, method, layout, wall_seconds, barrier, results))
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    total = sum(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    return float(total)
