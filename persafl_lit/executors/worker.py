"""A worker: trains and evaluates clients on one device. Both are pure functions of what they are given."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor

from persafl_lit.client import ClientDataModule, ClientModule, Report
from persafl_lit.data.federation import Federation
from persafl_lit.errors import ConfigError, first_line
from persafl_lit.evaluate import Finetune, Scores, evaluate_client, whole_batches
from persafl_lit.objectives import Maml, Moreau, Objective, Step

PRECISIONS: dict[str, torch.dtype] = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
}


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
    derivatives: str = "auto"


COST_GRADIENT = -1


class Task(NamedTuple):
    """A client's job and the model it read; with `rules` > 0 its evaluation from that model by so many fine-tuning rules; with
    `rules` = COST_GRADIENT the gradient there of its own cost F_i, over all its data."""

    client: int
    visit: int
    read: Tensor
    correction: Tensor | None = None
    rules: int = 0


class Update(NamedTuple):
    """What a client uploads: Delta = w_0 - w_Q, for SCAFFOLD also its new control variate, and a report."""

    delta: Tensor
    control: Tensor | None
    report: Report


class Worker:
    """Trains and evaluates on one device."""

    def __init__(self, work: Work) -> None:
        self.work = work
        fabric = make_fabric(work.accelerator, work.devices, work.precision)
        self.device, self.dtype = fabric.device, PRECISIONS[work.precision]
        self.federation = work.federation.to(self.device, self.dtype)
        backbone, smoothness = work.backbone.to(self.device, self.dtype), work.federation.smoothness
        self.module = ClientModule(backbone, work.objective, work.eta, smoothness, work.clip, derivatives=work.derivatives)
        fabric.setup(self.module, self.module.configure_optimizers())
        self.autocast = fabric.autocast
        self._devices = [] if fabric.device.type == "cpu" else [fabric.device]
        if isinstance(work.objective, Maml) and work.objective.differences and work.precision.startswith("bf16"):
            raise ConfigError(f"method.hvp={work.objective.hvp} drowns in the rounding of precision={work.precision}; use exact or first_order")
        if isinstance(work.objective, Moreau):
            work.objective.check_inner_step(work.federation.smoothness or 0.0)

    @property
    def start(self) -> Tensor:
        """A copy of the backbone's weights as one vector."""
        return self.module.f.point.clone()

    def train(self, task: Task) -> Update:
        """A client's visit: Algorithm 2 from download to upload."""
        work = self.work
        data = ClientDataModule(self.federation, task.client, work.objective, work.local_steps, work.batch_size, work.seed)
        # Fabric's precision holds for the whole job: one context, not one per step.
        with torch.random.fork_rng(self._devices), self.autocast():
            report = self.module.local_training(task.read, task.correction, data.steps(task.visit))
            delta = task.read - self.module.w
            if not work.objective.control:
                return Update(delta, None, report)
            whole = whole_batches(self.federation, task.client, work.batch_size, work.seed)
            control = self.module.whole_gradient(task.read, whole)
        return Update(delta, control, report._replace(evaluations=report.evaluations + len(whole)))

    def evaluate(self, task: Task) -> Scores:
        """Fine-tune-then-evaluate of one client."""
        work, rules = self.work, dict(itertools.islice(self.work.finetune.items(), task.rules))
        with torch.random.fork_rng(self._devices), self.autocast():
            return evaluate_client(self.module, self.federation, task.client, task.read, rules, work.batch_size, work.seed)

    def cost_gradient(self, task: Task) -> Update:
        """grad F_i(w): the objective's gradient with all of the client's training data as every batch."""
        work = self.work
        ((whole, _),) = whole_batches(self.federation, task.client, max(1, self.federation.count(task.client, "train")), work.seed)
        self.module.backbone.train()
        before = self.module.f.evaluations
        with torch.random.fork_rng(self._devices), self.autocast():
            gradient = work.objective.gradient(self.module.f, Step(task.read.clone(), task.read, [whole] * work.objective.batches))
        report = Report(0.0, self.module.f.evaluations - before, None)
        self.module.f.losses.clear()
        return Update(gradient.clone(), None, report)

    def state_dict(self, w: Tensor) -> dict[str, Tensor]:
        """The backbone's ordinary, contiguous state dict at w."""
        self.module.f.at(w)
        return {name: value.detach().cpu().contiguous().clone() for name, value in self.module.backbone.state_dict().items()}


def make_fabric(accelerator: str, devices: int | tuple[int, ...] | str, precision: str) -> Fabric:
    """A Fabric on one device, or a sentence about why not."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    try:
        named = list(devices) if isinstance(devices, tuple) else devices
        fabric = Fabric(accelerator=accelerator, devices=named, precision=precision)  # type: ignore[arg-type]
    except Exception as error:  # Fabric raises many types; each is about these three values
        raise ConfigError(f"accelerator={accelerator}, devices={devices}, precision={precision} cannot be set up: {first_line(error)}") from error
    if fabric.world_size != 1:
        raise ConfigError(f"a worker trains on one device; devices={devices} are {fabric.world_size}: name one, e.g. devices=[0]")
    fabric.launch()
    return fabric
