"""A client: Q local steps of an objective around a backbone, as a LightningModule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from persafl_lit.common.tensors import Tensors
from persafl_lit.data.federation import Batch
from persafl_lit.errors import ModelError, shown
from persafl_lit.learning.flat_loss import FlatLoss
from persafl_lit.learning.kernels.backprop import plain_layers, untouched
from persafl_lit.learning.local_optimizers import Local, restore, state_of
from persafl_lit.learning.objectives import Objective, Step
from persafl_lit.learning.personal_models import PersonalModel
from persafl_lit.models.classifier import Classifier

PERSONAL_BUFFERS = "personal_buffers"
"""The statistics (BatchNorm's) of a personal model, in a client's memory."""


class ClientModule(L.LightningModule):
    """Algorithm 2: from the model read, Q steps w_{i,q+1} = w_{i,q} - eta * gradient of the objective.

    `training_step` is one such step under manual optimisation; its batch is a list of as many `Batch`es as the
    objective asks for. The Fabric loop runs it through `visit` (one job), and so does `Trainer.fit` (one client alone).
    """

    def __init__(
        self,
        backbone: L.LightningModule,
        objective: Objective,
        eta: float,
        smoothness: float | None = None,
        clip: float | None = None,
        *,
        private: Collection[str] = (),
        turns: tuple[int, int] | None = None,
        personal: PersonalModel | None = None,
        derivatives: str = "auto",
        local: Local | None = None,
    ) -> None:
        """`turns` are FedRep's (private, shared): local steps of a visit that move one part alone, in this order."""
        super().__init__()
        self.automatic_optimization = False
        self.backbone = backbone
        self.objective = objective
        self.eta = eta
        self.smoothness = smoothness
        self.clip = clip
        self.private = private
        self.turns = turns
        self.personal = personal or PersonalModel()
        self.derivatives = derivatives
        self.local = local or Local()
        self.optimizer_state: Tensors = {}
        """What the last visit's optimizer left, where clients keep that."""
        self.kept: Tensors = {}
        """The personal model after the last visit, where clients have one."""
        self._personal_statistics: Tensor | None = None
        self.statistics: Collection[str] | None = None
        """Buffers that training changes; if None, all of them."""
        # A backbone may call self.log; a job's metrics are returned instead (one database call per step is too dear).
        backbone.log = backbone.log_dict = _ignore  # type: ignore[method-assign,assignment]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Called once the backbone is where it will be trained: its parameters become one vector."""
        self.flatten()
        return self.local.build(self.w, self.eta, self.backbone)

    def flatten(self) -> None:
        """The backbone's parameters as one vector w, and the place where each visit begins."""
        layers = _layers(self.backbone) if self.derivatives == "auto" else ()
        self.f = FlatLoss(self.backbone, self.smoothness, layers, self.private, self.statistics)
        elsewhere = self.objective.moves or self.personal.keeps
        self.w = self.f.point.clone() if elsewhere else self.f.point
        self.first = self.f.point.clone()
        """The first weights of the run."""
        self.read = self.w.clone()
        self.given: Tensors = {}

    def on_train_start(self) -> None:
        """Under `Trainer.fit`, whose optimizer counts the steps."""
        self._optimizer = self.optimizers()

    def training_step(self, batch: Sequence[Batch], batch_idx: int) -> Tensor:
        """Algorithm 2, one local step. Returns the loss where the step began, or near it."""
        self.f.losses.clear()
        self.f.keep_statistics = True
        version = self.w._version
        self.gradient = self.objective.gradient(self.f, Step(self.w, self.read, batch, self.given))
        if self.w._version != version:
            raise ModelError(
                f"{type(self.objective).__name__}.gradient changes step.w: it takes gradients elsewhere than at "
                "step.w, so it needs `moves = True`, or it works on step.w in place, so it needs a copy"
            )
        if not isinstance(self.gradient, Tensor) or self.gradient.shape != self.w.shape or not self.f.losses:
            raise ValueError(_wrong_gradient(self.objective, self.gradient, self.w))
        moved, gradient = self._moved(batch_idx)
        gradient = clipped(gradient, self.clip)
        if self._optimizer is None:
            moved.add_(gradient, alpha=-self.eta)  # what the optimizer does, without its bookkeeping
        else:
            if moved is not self.w:
                gradient = _padded(gradient, self.w, moved)
            if self.local.optimizer == "module":
                self.f.set_gradients(gradient)
            else:
                self.w.grad = gradient
            self._optimizer.step()
        return self.f.losses[0]

    _optimizer: Any = None

    def _moved(self, batch_idx: int) -> tuple[Tensor, Tensor]:
        """The part of w that this step moves, and its gradient: all, unless the parts take turns."""
        if self.turns is None:
            return self.w, self.gradient
        first = batch_idx % sum(self.turns) < self.turns[0]
        part = slice(self.f.shared, None) if first else slice(0, self.f.shared)
        return self.w[part], self.gradient[part]

    def on_train_end(self) -> None:
        self._optimizer = None
        self.f.load(self.w)

    def visit(
        self,
        read: Tensor,
        given: Tensors,
        steps: Sequence[Sequence[Batch]],
        memory: Tensors = MappingProxyType({}),
        personal_batches: Sequence[Batch] = (),
    ) -> tuple[float, float | None]:
        """Algorithm 2, lines 3 to 12: a whole job. Afterwards `self.w` is w_{i,Q}. Returns the mean loss and the last
        step's residual."""
        self.read, self.given, version = read, given, read._version
        self.kept, self._personal_statistics = self.personal_memory(memory), memory.get(PERSONAL_BUFFERS)
        self.w.copy_(read)
        self.backbone.train()
        if not self.local.plain:
            self._optimizer = self.local.build(self.w, self.eta, self.backbone)
            restore(self._optimizer, memory)
        firsts = [self._step(batches, step) for step, batches in enumerate(steps[:-1])]
        measures = type(self.objective).residual is not Objective.residual
        before = self.w.clone() if measures else self.w
        firsts.append(self._step(steps[-1], len(steps) - 1))
        if self._optimizer is not None:
            self.optimizer_state = state_of(self._optimizer) if self.local.keep_state else {}
            self._optimizer = self.w.grad = None
        residual = self.objective.residual(self.f, Step(before, read, steps[-1], given), self.gradient)
        self.kept = self.personal.finish(self._slope, read, personal_batches, self.kept, self.eta)
        if self._personal_statistics is not None:
            self.kept = {**self.kept, PERSONAL_BUFFERS: self._personal_statistics}
        if read._version != version:
            raise ModelError(
                f"{type(self.objective).__name__}.gradient changes step.read in place; others read it, so "
                "make a new tensor"
            )
        return float(torch.stack(firsts).double().mean()), residual

    def personal_memory(self, memory: Tensors) -> Tensors:
        """What the client keeps of its personal model; at its first visit, the start."""
        return {name: memory.get(name, value) for name, value in self.personal.start(self.first).items()}

    def _step(self, batches: Sequence[Batch], number: int) -> Tensor:
        """One local step, and one of the personal model beside it."""
        self.kept = self.personal.step(self._slope, self.w, batches[0], self.kept, self.eta, number)
        return self.training_step(batches, number)

    def _slope(self, point: Tensor, batch: Batch) -> Tensor:
        """grad f(point; D) for the personal model, which has statistics (BatchNorm's) of its own."""
        statistics = self.f.statistics
        if statistics is None:
            return clipped(self.f.gradient(point, batch), self.clip).clone()
        others = statistics.vector()
        statistics.load(statistics.start if self._personal_statistics is None else self._personal_statistics)
        self.f.keep_statistics = True
        slope = clipped(self.f.gradient(point, batch), self.clip).clone()
        self._personal_statistics = statistics.vector()
        statistics.load(others)
        return slope

    def whole_gradient(self, w: Tensor, chunks: Sequence[tuple[Batch, int]]) -> Tensor:
        """grad f_i(w) over all of a client's data."""
        total = torch.zeros_like(w)
        for batch, count in chunks:
            total.add_(self.f.gradient(w, batch), alpha=count)
        self.f.losses.clear()
        return total.div_(sum(count for _, count in chunks))


def _layers(backbone: nn.Module) -> Sequence[nn.Module]:
    """The layers of a backbone that is nothing but the cross-entropy of plain layers; of any other, none."""
    if type(backbone) is not Classifier or not untouched(backbone):
        return ()
    alone = len([*backbone.parameters()]) == len([*backbone.network.parameters()])
    return plain_layers(backbone.network) if alone else ()


def _padded(gradient: Tensor, w: Tensor, moved: Tensor) -> Tensor:
    """A gradient of one part, with zeros for the other."""
    whole = torch.zeros_like(w)
    start = moved.storage_offset() - w.storage_offset()
    whole[start : start + len(moved)] = gradient
    return whole


def clipped(gradient: Tensor, clip: float | None) -> Tensor:
    """min(1, clip / |gradient|) gradient; the norm in double precision, where the squares of large gradients are
    finite."""
    if clip is None:
        return gradient
    norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    return gradient * (clip / norm) if norm > clip else gradient


def _wrong_gradient(objective: Objective, gradient: Any, w: Tensor) -> str:
    if isinstance(gradient, Tensor) and gradient.shape == w.shape:
        return (
            f"{type(objective).__name__}.gradient must call f.gradient or f.hessian_vector at least once a step, "
            "and did not"
        )
    got = f"one of shape {tuple(gradient.shape)}" if isinstance(gradient, Tensor) else shown(gradient)
    return (
        f"{type(objective).__name__}.gradient must return a tensor of shape {tuple(w.shape)}, that of step.w; got {got}"
    )


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass
