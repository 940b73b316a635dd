"""A worker: trains and evaluates clients on one device. Both are pure functions of what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor

from persafl_lit.client import ClientDataModule, ClientModule
from persafl_lit.data.federation import Federation
from persafl_lit.errors import ConfigError, first_line
from persafl_lit.evaluate import Scores, evaluate_client, whole_batches
from persafl_lit.finetune import Finetune
from persafl_lit.messages import CostGradient, Evaluate, Gradient, Message, Tensors, Train, Update
from persafl_lit.objectives import Maml, Moreau, Objective, Step
from persafl_lit.sharing import Sharing

PRECISIONS: dict[str, torch.dtype] = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
}


ALIGNED = 64
"""Bytes: tensors that travel together begin at multiples of this."""


@dataclass(frozen=True)
class Work:
    """Everything a worker must know beforehand; what varies comes with each job."""

    backbone: L.LightningModule
    federation: Federation
    objective: Objective
    finetune: Mapping[str, Finetune]
    """Rules by name; the common one first."""
    local_steps: int
    eta: float
    batch_size: int
    seed: int
    accelerator: str = "cpu"
    devices: int | tuple[int, ...] | str = 1
    precision: str = "32-true"
    clip: float | None = None
    sharing: Sharing = field(default_factory=Sharing)
    derivatives: str = "auto"


class Worker:
    """Trains and evaluates on one device; a message's result depends on nothing but the message."""

    def __init__(self, work: Work, fabric: Fabric | None = None) -> None:
        """With the run's Fabric where there is one; a worker process of its own makes one for its device and precision."""
        self.work = work
        fabric = fabric or make_fabric(work.accelerator, work.devices, work.precision)
        self.device, self.dtype, self.autocast = fabric.device, PRECISIONS[work.precision], fabric.autocast
        self.federation = work.federation.to(self.device, self.dtype)
        backbone = work.backbone.to(self.device, self.dtype)
        private = work.sharing.names(backbone)
        if private and work.objective.keeps:
            raise ConfigError("an objective that keeps vectors of the model's size (scaffold) shares the whole model: leave method.private at none")
        choices: Any = {"private": private, "derivatives": work.derivatives}
        self.module = ClientModule(backbone, work.objective, work.eta, work.federation.smoothness, work.clip, **choices)
        self.module.flatten()
        self.start = self.module.f.point[: self.module.f.shared].clone()
        """The shared part of the backbone's first weights, as one vector."""
        self._private = self.module.f.point[self.module.f.shared :].clone()
        self._devices = [] if fabric.device.type == "cpu" else [fabric.device]
        if isinstance(work.objective, Maml) and work.objective.differences and work.precision.startswith("bf16"):
            raise ConfigError(f"method.hvp={work.objective.hvp} drowns in the rounding of precision={work.precision}; use exact or first_order")
        if isinstance(work.objective, Moreau):
            work.objective.check_inner_step(work.federation.smoothness or 0.0)

    @property
    def keeps(self) -> bool:
        """Whether clients keep anything between visits."""
        return bool(len(self._private) or self.work.objective.keeps)

    @property
    def transfer_bytes(self) -> int:
        """Of one download, and of one upload."""
        return self.start.nbytes * (1 + len(self.work.objective.sends))

    @property
    def room(self) -> int:
        """Bytes that the tensors of a message or of its result take."""
        kept = len(self.work.objective.keeps) * self.start.nbytes + self._private.nbytes
        return self.transfer_bytes + kept + ALIGNED * (2 + len(self.work.objective.sends) + len(self.work.objective.keeps))

    def model(self, w: Tensor, memory: Tensors) -> Tensor:
        """[shared, private]: the shared model with what the client kept, or with the initial private values."""
        return torch.cat([w, memory.get("private", self._private)]) if len(self._private) else w

    def perform(self, message: Message) -> Update | Scores | Gradient:
        if isinstance(message, Train):
            return self.train(message)
        return self.evaluate(message) if isinstance(message, Evaluate) else self.cost_gradient(message)

    def train(self, message: Train) -> Update:
        """A client's visit: Algorithm 2 from download to upload."""
        work, module, shared = self.work, self.module, self.module.f.shared
        read = self.model(message.read["w"], message.memory)
        data = ClientDataModule(self.federation, message.client, work.objective, work.local_steps, work.batch_size, work.seed)
        before = module.f.evaluations

        def whole_gradient() -> Tensor:
            return module.whole_gradient(read, whole_batches(self.federation, message.client, work.batch_size, work.seed))

        # Fabric's precision holds for the whole job: one context, not one per step.
        with torch.random.fork_rng(self._devices), self.autocast():
            loss, residual = module.visit(read, work.objective.begin(message.read, message.memory), data.steps(message.visit))
            delta, private = read[:shared] - module.w[:shared], module.w[shared:].clone()
            sent, memory = work.objective.end(whole_gradient, message.memory)
        if len(private):
            memory = {**memory, "private": private}
        return Update({"delta": delta, **sent}, memory, loss, module.f.evaluations - before, residual)

    def evaluate(self, message: Evaluate) -> Scores:
        """Fine-tune-then-evaluate of one client."""
        work, rules = self.work, {name: self.work.finetune[name] for name in message.rules}
        w = self.model(message.read["w"], message.memory)
        with torch.random.fork_rng(self._devices), self.autocast():
            return evaluate_client(self.module, self.federation, message.client, w, rules, work.batch_size, work.seed)

    def cost_gradient(self, message: CostGradient) -> Gradient:
        """grad F_i(w) of the shared part: the objective's gradient with all of the client's training data as every batch."""
        work, w = self.work, self.model(message.read["w"], message.memory)
        ((whole, _),) = whole_batches(self.federation, message.client, max(1, self.federation.count(message.client, "train")), work.seed)
        self.module.backbone.train()
        with torch.random.fork_rng(self._devices), self.autocast():
            gradient = work.objective.gradient(self.module.f, Step(w.clone(), w, [whole] * work.objective.batches))
        self.module.f.losses.clear()
        return Gradient({"gradient": gradient[: self.module.f.shared].clone()})

    def state_dict(self, w: Tensor, memory: Tensors | None = None) -> dict[str, Tensor]:
        """The backbone's ordinary, contiguous state dict at w, with a client's memory or the initial private values."""
        self.module.f.at(self.model(w, memory or {}))
        return {name: value.detach().cpu().contiguous().clone() for name, value in self.module.backbone.state_dict().items()}


def make_fabric(
    accelerator: str, devices: int | tuple[int, ...] | str, precision: str, callbacks: Sequence[Any] = (), loggers: Sequence[Any] = ()
) -> Fabric:
    """A Fabric on one device, or a sentence about why not. It gets copies of the lists: Fabric changes the one it is given."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    try:
        named = list(devices) if isinstance(devices, tuple) else devices
        fabric = Fabric(accelerator=accelerator, devices=named, precision=precision, callbacks=[*callbacks], loggers=[*loggers])  # type: ignore[arg-type]
    except Exception as error:  # Fabric raises many types; each is about these three values
        raise ConfigError(f"accelerator={accelerator}, devices={devices}, precision={precision} cannot be set up: {first_line(error)}") from error
    if fabric.world_size != 1:
        raise ConfigError(f"a worker trains on one device; devices={devices} are {fabric.world_size}: name one, e.g. devices=[0]")
    fabric.launch()
    return fabric
