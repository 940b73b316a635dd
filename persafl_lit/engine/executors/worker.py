"""A worker: trains and evaluates clients on one device. Both are pure functions of what they are given."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor

from persafl_lit.common.tensors import Tensors
from persafl_lit.data.federation import Batch, Federation
from persafl_lit.engine.messages import CostGradient, Evaluate, Gradient, Message, Train, Update
from persafl_lit.errors import ConfigError, ModelError, PersaflError, first_line, located
from persafl_lit.learning.client_data import ClientDataModule
from persafl_lit.learning.client_module import PERSONAL_BUFFERS, ClientModule
from persafl_lit.learning.evaluation import Models, average_statistics, evaluate_client, whole_batches
from persafl_lit.learning.flat_loss import changing_buffers
from persafl_lit.learning.local_optimizers import VECTORS, Local
from persafl_lit.learning.metrics import Metrics
from persafl_lit.learning.objectives import Maml, Moreau, Objective, Step
from persafl_lit.learning.personal_models import PersonalModel
from persafl_lit.learning.personalisation import Finetune
from persafl_lit.learning.running_statistics import ConstantBuffers
from persafl_lit.learning.scores import Scores
from persafl_lit.learning.sharing import Sharing
from persafl_lit.server.buffers import Buffers

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
    personal: PersonalModel = field(default_factory=PersonalModel)
    derivatives: str = "auto"
    buffers: Buffers = field(default_factory=Buffers)
    local: Local = field(default_factory=Local)
    metrics: Metrics = field(default_factory=Metrics)


class Worker:
    """Trains and evaluates on one device; a message's result depends on nothing but the message."""

    def __init__(self, work: Work, fabric: Fabric | None = None) -> None:
        """With the run's Fabric where there is one; a worker process of its own makes one for its device and
        precision."""
        self.work = work
        fabric = fabric or make_fabric(work.accelerator, work.devices, work.precision)
        self.device, self.dtype, self.autocast = fabric.device, PRECISIONS[work.precision], fabric.autocast
        self.federation = work.federation.to(self.device, self.dtype)
        backbone = work.backbone.to(self.device, self.dtype)
        private = work.sharing.names(backbone)
        if private and work.objective.keeps:
            raise ConfigError(
                "an objective that keeps vectors of the model's size (scaffold) shares the whole model: "
                "leave method.private at none"
            )
        if private and work.personal.keeps:
            raise ConfigError(
                f"a personal model ({type(work.personal).__name__}) is a whole model beside the shared one: leave "
                "method.private at none"
            )
        if work.sharing.body_steps is not None and not 0 < len(private) < sum(
            parameter.requires_grad for parameter in backbone.parameters()
        ):
            raise ConfigError(
                "method.body_steps takes turns between a private and a shared part, and here is only one of them: "
                "set method.private, or method.body_steps=null"
            )
        self.notes = tuple(note for note in (work.sharing.note(backbone),) if note)
        """What a user should be told about what is private."""
        work.local.check(work.objective)
        body = work.sharing.body_steps
        choices: Any = {
            "private": private,
            "turns": None if body is None else (work.local_steps - body, body),
            "personal": work.personal,
            "derivatives": work.derivatives,
            "local": work.local,
        }
        self.module = ClientModule(backbone, work.objective, work.eta, work.federation.smoothness, work.clip, **choices)
        self._devices = [] if fabric.device.type == "cpu" else [fabric.device]
        changing = self._changing_buffers()
        if changing and work.buffers.buffers == "refuse":
            raise ConfigError(
                f"training changes the model's buffer {changing[0]!r} (BatchNorm does that), and "
                "model.buffers=refuse; use local or shared, "
                "GroupNorm or LayerNorm, or BatchNorm with track_running_stats=False"
            )
        layers = {name.rpartition(".")[0] for name in private}
        kept = {"norm", "all"} & {*work.sharing.private} or any(name.rpartition(".")[0] in layers for name in changing)
        if changing and kept and work.buffers.buffers == "shared":
            raise ConfigError(
                "private normalisation layers keep their statistics, too: set model.buffers=local, or method.private"
            )
        self.module.statistics = changing
        self.module.flatten()
        if not work.local.plain:  # an error in it is raised before anything starts
            work.local.build(self.module.w, work.eta, backbone)
        self._constants = ConstantBuffers(backbone, changing)
        statistics = self.module.f.statistics
        self.first_buffers: Tensors = {} if statistics is None else {"buffers": statistics.start}
        """The first values of buffers that training changes; nothing where there are none."""
        self.start = self.module.f.point[: self.module.f.shared].clone()
        """The shared part of the backbone's first weights, as one vector."""
        self._private = self.module.f.point[self.module.f.shared :].clone()
        self.digest = self._digest()
        """A hash of the first weights, and of what else the backbone holds."""
        if isinstance(work.objective, Maml) and work.objective.differences and work.precision.startswith("bf16"):
            raise ConfigError(
                f"method.hvp={work.objective.hvp} drowns in the rounding of precision={work.precision}; use "
                "exact or first_order"
            )
        if isinstance(work.objective, Moreau):
            work.objective.check_inner_step(work.federation.smoothness or 0.0)

    @property
    def keeps(self) -> bool:
        """Whether clients keep anything between visits."""
        return bool(
            self.keeps_model
            or self.work.objective.keeps
            or self.work.local.keep_state
            or (self.first_buffers and not self.published)
        )

    @property
    def keeps_model(self) -> bool:
        """Whether a client has a model of its own: private parameters, or a personal model."""
        return bool(len(self._private) or self.work.personal.keeps)

    @property
    def published(self) -> Tensors:
        """What the server begins with beside the shared model."""
        return self.first_buffers if self.work.buffers.buffers == "shared" else {}

    @property
    def transfer_bytes(self) -> int:
        """Of one download, and of one upload."""
        return self.start.nbytes * (1 + len(self.work.objective.sends)) + sum(
            tensor.nbytes for tensor in self.published.values()
        )

    @property
    def room(self) -> int:
        """Bytes that the tensors of a message or of its result take."""
        work, parameters = self.work, len([*self.module.backbone.parameters()])
        tensors = 3 + len(work.objective.sends) + len(work.objective.keeps) + 3 * work.personal.keeps
        if work.local.keep_state:
            tensors += (VECTORS[work.local.optimizer] + 1) * (2 * parameters if work.local.optimizer == "module" else 1)
        statistics = sum(tensor.nbytes for tensor in self.first_buffers.values())
        return self.transfer_bytes + self.memory_bytes + statistics + ALIGNED * tensors

    @property
    def memory_bytes(self) -> int:
        """What one client keeps between visits; of an optimizer's state about that."""
        work, buffers = self.work, sum(tensor.nbytes for tensor in self.first_buffers.values())
        personal = sum(tensor.nbytes for tensor in work.personal.start(self.module.first).values())
        kept = len(work.objective.keeps) * self.start.nbytes + self._private.nbytes + personal
        kept += buffers * ((not self.published) + work.personal.keeps)
        if work.local.keep_state:
            kept += VECTORS[work.local.optimizer] * self.module.f.point.nbytes
        return kept

    def model(self, w: Tensor, memory: Tensors) -> Tensor:
        """[shared, private]: the shared model with what the client kept, or with the initial private values."""
        return torch.cat([w, memory.get("private", self._private)]) if len(self._private) else w

    def _changing_buffers(self) -> list[str]:
        """Found in a training step of client 0."""
        if next(self.module.backbone.buffers(), None) is None:
            return []
        try:
            (batch,) = self.federation.batches(0, "D", 0, 1, self.work.batch_size, self.work.seed)
            with torch.random.fork_rng(self._devices), self.autocast():
                return changing_buffers(self.module.backbone, batch)
        except PersaflError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ModelError(f"client 0 cannot be trained: {located(error)}") from error

    def _digest(self) -> str:
        seen = hashlib.sha256(self.model(self.start, {}).double().cpu().numpy().tobytes())
        backbone = self.module.backbone
        frozen = [(name, parameter) for name, parameter in backbone.named_parameters() if not parameter.requires_grad]
        for name, value in (*frozen, *backbone.named_buffers()):
            seen.update(name.encode() + value.detach().double().cpu().numpy().tobytes())
        return seen.hexdigest()

    def _load_statistics(self, client: int, w: Tensor, known: Tensor | None) -> None:
        """BatchNorm's, if they are known; else those of w on the client's data."""
        if (statistics := self.module.f.statistics) is None:
            return
        if known is None:
            average_statistics(self.module, self.federation, client, w, self.work.batch_size, self.work.seed)
        else:
            statistics.load(known)

    def _training_statistics(self, read: Tensors, memory: Tensors) -> Tensor | None:
        """The shared ones, or the client's own; without any it begins to train with the first ones."""
        return read.get("buffers", memory.get("buffers", self.first_buffers.get("buffers")))

    def models(self, client: int, read: Tensors, memory: Tensors) -> Models:
        """What the client could use: the shared model, and its own where it keeps one.

        Statistics that the client has belong to the model that it trained: the shared one, or the one with its private
        parameters. A model that has none is evaluated with those of the client's data.
        """
        if not self.keeps_model:
            w, statistics = read["w"], read.get("buffers", memory.get("buffers"))
            return Models(w, None, lambda own: self._load_statistics(client, w, statistics))
        shared = self.model(read["w"], {})
        trained = read.get("buffers", memory.get("buffers"))
        if self.work.personal.keeps:
            mine = self.work.personal.model(shared, self.module.personal_memory(memory))
            known = {True: memory.get(PERSONAL_BUFFERS), False: trained}
        else:
            mine = self.model(read["w"], memory)
            known = {True: trained, False: read.get("buffers")}
        return Models(shared, mine, lambda own: self._load_statistics(client, mine if own else shared, known[own]))

    def perform(self, message: Message) -> Update | Scores | Gradient:
        if isinstance(message, Train):
            return self.train(message)
        return self.evaluate(message) if isinstance(message, Evaluate) else self.cost_gradient(message)

    def train(self, message: Train) -> Update:
        """A client's visit: Algorithm 2 from download to upload."""
        work, module, shared = self.work, self.module, self.module.f.shared
        read = self.model(message.read["w"], message.memory)
        data = ClientDataModule(
            self.federation, message.client, work.objective, work.local_steps, work.batch_size, work.seed
        )
        before = module.f.evaluations

        def whole_gradient() -> Tensor:
            return module.whole_gradient(
                read,
                whole_batches(self.federation, message.client, work.batch_size, work.seed, bool(self.first_buffers)),
            )

        # Fabric's precision holds for the whole job: one context, not one per step.
        with torch.random.fork_rng(self._devices), self.autocast():
            self._load_statistics(message.client, read, self._training_statistics(message.read, message.memory))
            loss, residual = module.visit(
                read,
                work.objective.begin(message.read, message.memory),
                data.steps(message.visit),
                message.memory,
                self._personal_batches(message),
            )
            delta, private = read[:shared] - module.w[:shared], module.w[shared:].clone()
            sent, memory = work.objective.end(whole_gradient, message.memory)
        if len(private):
            memory = {**memory, "private": private}
        memory = {**memory, **module.optimizer_state, **module.kept}
        self._constants.check()
        if (statistics := module.f.statistics) is not None:
            now = {"buffers": statistics.vector()}
            sent, memory = ({**sent, **now}, memory) if self.published else (sent, {**memory, **now})
        return Update({"delta": delta, **sent}, memory, loss, module.f.evaluations - before, residual)

    def _personal_batches(self, message: Train) -> list[Batch]:
        """Minibatches of the personal model's own steps."""
        count = self.work.personal.batches(self.work.local_steps)
        return (
            self.federation.batches(
                message.client, "personal", message.visit, count, self.work.batch_size, self.work.seed
            )
            if count
            else []
        )

    def evaluate(self, message: Evaluate) -> Scores:
        """Fine-tune-then-evaluate of one client."""
        work, rules = self.work, {name: self.work.finetune[name] for name in message.rules}
        models = self.models(message.client, message.read, message.memory)
        with torch.random.fork_rng(self._devices), self.autocast():
            scores = evaluate_client(
                self.module, self.federation, message.client, models, rules, work.batch_size, work.seed, work.metrics
            )
        self._constants.check()
        return scores

    def cost_gradient(self, message: CostGradient) -> Gradient:
        """grad F_i(w) of the shared part: the objective's gradient with all of the client's training data as every
        batch."""
        work, w = self.work, self.model(message.read["w"], message.memory)
        ((whole, _),) = whole_batches(
            self.federation, message.client, max(1, self.federation.count(message.client, "train")), work.seed
        )
        self.module.backbone.train()
        with torch.random.fork_rng(self._devices), self.autocast():
            self._load_statistics(message.client, w, self._training_statistics(message.read, message.memory))
            gradient = work.objective.gradient(self.module.f, Step(w.clone(), w, [whole] * work.objective.batches))
        self.module.f.losses.clear()
        return Gradient({"gradient": gradient[: self.module.f.shared].clone()})

    def state_dict(self, read: Tensors, memory: Tensors, client: int | None = None) -> dict[str, Tensor]:
        """The backbone's ordinary, contiguous state dict: the shared model with a client's memory, or with the initial
        private values.

        A client's own statistics are those that it is evaluated with.
        """
        with torch.random.fork_rng(self._devices), self.autocast():
            if client is None:
                w = self.model(read["w"], memory)
                self._load_statistics(0, w, self._training_statistics(read, memory))
            else:
                models = self.models(client, read, memory)
                w = models.shared if models.own is None else models.own
                models.load_statistics(models.own is not None)
        self.module.f.load(w)
        found = {
            name: value.detach().cpu().contiguous().clone() for name, value in self.module.backbone.state_dict().items()
        }
        # As it was: a worker process that replaces a lost one may be made of this backbone.
        self.module.f.load(self.module.first)
        if self.module.f.statistics is not None:
            self.module.f.statistics.load(self.module.f.statistics.start)
        return found


def make_fabric(
    accelerator: str,
    devices: int | tuple[int, ...] | str,
    precision: str,
    callbacks: Sequence[Any] = (),
    loggers: Sequence[Any] = (),
) -> Fabric:
    """A Fabric on one device, or a sentence about why not. It gets copies of the lists: Fabric changes the one it is
    given."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    try:
        named = list(devices) if isinstance(devices, tuple) else devices
        fabric = Fabric(
            accelerator=accelerator,
            devices=named,
            precision=precision,  # type: ignore[arg-type]
            callbacks=[*callbacks],
            loggers=[*loggers],
        )
    except Exception as error:  # Fabric raises many types; each is about these three values
        raise ConfigError(
            f"accelerator={accelerator}, devices={devices}, precision={precision} cannot be set up: {first_line(error)}"
        ) from error
    if fabric.world_size != 1:
        raise ConfigError(
            f"a worker trains on one device; devices={devices} are {fabric.world_size}: name one, e.g. devices=[0]"
        )
    fabric.launch()
    return fabric
