"""Who does the work: jobs and evaluations, each a pure function of its inputs.

A job's result depends only on (the model read, client, visit, seed), so an executor may run it whenever that model exists,
anywhere, in any order, or twice: the run's result has the same bits.
"""

from __future__ import annotations

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
from persafl_lit.objectives import Maml, Moreau, Objective

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
    finetune: Finetune
    local_steps: int
    eta: float
    batch_size: int
    seed: int


class Task(NamedTuple):
    """A job and the model it read."""

    client: int
    visit: int
    read: Tensor
    correction: Tensor | None


class Update(NamedTuple):
    """What a client uploads: Delta = w_0 - w_Q, for SCAFFOLD also its new control variate, and a report."""

    delta: Tensor
    control: Tensor | None
    report: Report


class Worker:
    """Trains and evaluates on one device."""

    def __init__(self, work: Work, fabric: Fabric, precision: str) -> None:
        self.work = work
        dtype = PRECISIONS[precision]
        self.federation = work.federation.to(fabric.device, dtype)
        self.module = ClientModule(work.backbone.to(fabric.device, dtype), work.objective, work.eta, work.federation.smoothness)
        fabric.setup(self.module, self.module.configure_optimizers())
        self.autocast = fabric.autocast
        self._devices = [] if fabric.device.type == "cpu" else [fabric.device]
        if isinstance(work.objective, Maml) and work.objective.differences and precision.startswith("bf16"):
            raise ConfigError(f"method.hvp={work.objective.hvp} drowns in the rounding of precision={precision}; use exact or first_order")
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

    def evaluate(self, client: int, w: Tensor) -> Scores:
        """Fine-tune-then-evaluate of one client."""
        work = self.work
        with torch.random.fork_rng(self._devices), self.autocast():
            return evaluate_client(self.module, self.federation, client, w, work.finetune, work.batch_size, work.seed)

    def state_dict(self, w: Tensor) -> dict[str, Tensor]:
        """The backbone's ordinary, contiguous state dict at w."""
        self.module.f.at(w)
        return {name: value.detach().cpu().contiguous().clone() for name, value in self.module.backbone.state_dict().items()}


class Serial:
    """One job after the other, in this process, when its result is asked for."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pending: dict[int, Task] = {}

    def submit(self, index: int, task: Task) -> None:
        """Job `index` may start: the model it reads exists."""
        self.pending[index] = task

    def result(self, index: int) -> tuple[Task, Update]:
        task = self.pending.pop(index)
        return task, self.worker.train(task)

    def evaluate(self, models: list[Tensor]) -> tuple[Scores, ...]:
        """One client per model."""
        return tuple(self.worker.evaluate(client, w) for client, w in enumerate(models))


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
