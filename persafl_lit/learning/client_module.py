"""A client: Q local steps of an objective around a backbone, as a LightningModule.

A *backbone* is any LightningModule whose `training_step(batch, batch_idx)` returns a loss; where accuracy is wanted, its
`forward(inputs)` gives class scores. Its `configure_optimizers` is used only with `local.optimizer=module`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from persafl_lit.backprop import plain_layers, untouched
from persafl_lit.data import Federation, Quadratics
from persafl_lit.data.federation import IGNORED, Batch
from persafl_lit.errors import ConfigError, ModelError, located, shown
from persafl_lit.loss import FlatLoss, class_dimension
from persafl_lit.messages import Tensors
from persafl_lit.models import Custom, Point
from persafl_lit.objectives import Objective, Step
from persafl_lit.optimizers import Local, restore, state_of
from persafl_lit.plugins import exits_refused, import_path
from persafl_lit.streams import torch_seed

# -- backbones --------------------------------------------------------------------------------------------------------


class Classifier(L.LightningModule):
    """A network with the cross-entropy loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.network(inputs)
        return scores

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return self.score_loss(self(inputs), labels)

    def score_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The loss from scores that are known already: spares evaluation a second forward pass."""
        return F.cross_entropy(scores, labels)


class TokenClassifier(Classifier):
    """Scores for each of several tokens: (n, T, classes) or torch's (n, classes, T), with labels (n, T)."""

    def score_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.movedim(class_dimension(scores, labels), 1), labels, ignore_index=IGNORED)


class Regressor(Classifier):
    """A network with the mean squared error."""

    def score_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(scores.reshape(labels.shape), labels)


CLASSIFIERS: dict[str, type[Classifier]] = {"classification": Classifier, "tokens": TokenClassifier, "regression": Regressor}
"""What a network becomes, by the federation's task."""


class QuadraticModel(L.LightningModule):
    """The vector w of a quadratic: f(w) = 1/2 (w - a)^T H (w - a), plus <noise, w> where gradients are noisy."""

    def __init__(self, w0: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w0.clone())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        H, a, *noise = batch
        away = self.w - a
        loss = 0.5 * away @ (H @ away)
        return loss + noise[0] @ self.w if noise else loss


def build_backbone(model: Any, federation: Federation, seed: int, allow_code: bool = False) -> L.LightningModule:
    """The backbone that the model's settings describe, for this data, with weights named by the seed."""
    if isinstance(federation, Quadratics) != isinstance(model, Point):
        raise ConfigError(
            "data=quadratic goes with model=point and nothing else does; leave model out and the data set chooses its own "
            f"(here: model={type(model).__name__.lower()})"
        )
    if isinstance(federation, Quadratics):
        return QuadraticModel(federation.w0)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(torch_seed(seed, "init"))
        if isinstance(model, Custom):
            return _import_backbone(model, federation, allow_code)
        return _network_for(model, federation)


def _network_for(model: Any, federation: Federation) -> L.LightningModule:
    """One of our networks, for the shape and the classes of the data."""
    name = type(model).__name__.lower()
    shape, classes = getattr(federation, "shape", ()), getattr(federation, "classes", 0)
    if not shape or not classes:
        raise ConfigError(f"model={name} needs samples of one shape with a label each, and this data has others; give a model of your own")
    data, _ = next(federation.whole(0, "test", 1))
    if not data[0].is_floating_point():
        raise ConfigError(
            f"model={name} takes floating-point inputs, and this data has {str(data[0].dtype).removeprefix('torch.')}, which are kept as they are; "
            "scale them to floats, or give a model of your own that embeds them"
        )
    task = getattr(federation, "task", "classification")
    if task == "tokens":
        raise ConfigError(f"model={name} gives one answer per sample, and this data has several labels for each; give a model of your own")
    return CLASSIFIERS[task](model.network(shape, classes))


def build_from_class(cls: type[L.LightningModule], federation: Federation, seed: int) -> L.LightningModule:
    """A backbone of the user's class, with weights named by the seed."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(torch_seed(seed, "init"))
        try:
            made = cls()
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ModelError(f"cannot build the model {cls.__name__} without arguments: {located(error)}") from error
    return check_backbone(made, federation)


def _import_backbone(model: Custom, federation: Federation, allow_code: bool) -> L.LightningModule:
    if not allow_code:
        raise ConfigError(f"model.path={model.path} runs code from outside persafl_lit; pass allow_code=true if you trust it")
    try:
        found = import_path(model.path)
        if not (isinstance(found, type) and issubclass(found, L.LightningModule)):  # nothing else is ever called
            raise TypeError(f"it is no LightningModule class but {shown(found)}")
        with exits_refused():
            made = found(**model.args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise ModelError(f"cannot build model.path={model.path!r} with model.args={shown(dict(model.args))}: {located(error)}") from error
    return check_backbone(made, federation)


def check_backbone(backbone: Any, federation: Federation | None = None) -> L.LightningModule:
    """Refuse what could not be trained, before anything starts; a plain nn.Sequential gets the loss of the federation's task."""
    if type(backbone) is nn.Sequential:
        backbone = CLASSIFIERS[getattr(federation, "task", "classification")](backbone)
    if not isinstance(backbone, L.LightningModule):
        raise ConfigError(f"the model must be a LightningModule whose training_step returns a loss; got {type(backbone).__name__}")
    if type(backbone).training_step is L.LightningModule.training_step:
        raise ConfigError(f"{type(backbone).__name__} has no training_step(batch, batch_idx) that returns a loss")
    return backbone


# -- local training ---------------------------------------------------------------------------------------------------


class ClientModule(L.LightningModule):
    """Algorithm 2: from the model read, Q steps w_{i,q+1} = w_{i,q} - eta * gradient of the objective.

    `training_step` is one such step under manual optimisation; its batch is a list of as many `Batch`es as the objective asks
    for. The Fabric loop runs it through `visit` (one job), and so does `Trainer.fit` (one client alone).
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
        derivatives: str = "auto",
        local: Local | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backbone = backbone
        self.objective = objective
        self.eta = eta
        self.smoothness = smoothness
        self.clip = clip
        self.private = private
        self.derivatives = derivatives
        self.local = local or Local()
        self.optimizer_state: Tensors = {}
        """What the last visit's optimizer left, where clients keep that."""
        self.statistics: Collection[str] | None = None
        """Buffers that training changes; None is all that there are."""
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
        self.w = self.f.point.clone() if self.objective.moves else self.f.point
        self.read = self.w.clone()
        self.given: Tensors = {}

    def on_train_start(self) -> None:
        """Under `Trainer.fit`, whose optimizer counts the steps."""
        self._optimizer = self.optimizers()

    def training_step(self, batch: Sequence[Batch], batch_idx: int) -> Tensor:
        """Algorithm 2, one local step. Returns the loss where the step began, or near it."""
        self.f.losses.clear()
        self.f.keep_statistics = True
        self.gradient = self.objective.gradient(self.f, Step(self.w, self.read, batch, self.given))
        if not isinstance(self.gradient, Tensor) or self.gradient.shape != self.w.shape or not self.f.losses:
            raise ValueError(_wrong_gradient(self.objective, self.gradient, self.w))
        gradient = clipped(self.gradient, self.clip)
        if self._optimizer is None:
            self.w.add_(gradient, alpha=-self.eta)  # what the optimizer does, without its bookkeeping
        else:
            if self.local.optimizer == "module":
                self.f.set_gradients(gradient)
            else:
                self.w.grad = gradient
            self._optimizer.step()
        return self.f.losses[0]

    _optimizer: Any = None

    def on_train_end(self) -> None:
        self._optimizer = None
        self.f.at(self.w)

    def visit(
        self, read: Tensor, given: Tensors, steps: Sequence[Sequence[Batch]], memory: Tensors = MappingProxyType({})
    ) -> tuple[float, float | None]:
        """Algorithm 2, lines 3 to 12: a whole job. Afterwards `self.w` is w_{i,Q}. Returns the mean loss and the last step's residual."""
        self.read, self.given, version = read, given, read._version
        self.w.copy_(read)
        self.backbone.train()
        if not self.local.plain:
            self._optimizer = self.local.build(self.w, self.eta, self.backbone)
            restore(self._optimizer, memory)
        firsts = [self.training_step(batches, step) for step, batches in enumerate(steps[:-1])]
        measures = type(self.objective).residual is not Objective.residual
        stood = self.w.clone() if measures else self.w
        firsts.append(self.training_step(steps[-1], len(steps) - 1))
        if self._optimizer is not None:
            self.optimizer_state = state_of(self._optimizer) if self.local.keep_state else {}
            self._optimizer = self.w.grad = None
        residual = self.objective.residual(self.f, Step(stood, read, steps[-1], given), self.gradient)
        if read._version != version:
            raise ModelError(f"{type(self.objective).__name__}.gradient changes step.read in place; others read it, so make a new tensor")
        return float(torch.stack(firsts).double().mean()), residual

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


def clipped(gradient: Tensor, clip: float | None) -> Tensor:
    """min(1, clip / |gradient|) gradient; the norm in double precision, where the squares of large gradients are finite."""
    if clip is None:
        return gradient
    norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    return gradient * (clip / norm) if norm > clip else gradient


class ClientDataModule(L.LightningDataModule):
    """One client's local steps as a LightningDataModule: `visits` visits of Q steps, the batches that the loop would draw."""

    def __init__(
        self, federation: Federation, client: int, objective: Objective, local_steps: int, batch_size: int, seed: int, visits: int = 1
    ) -> None:
        super().__init__()
        self.federation = federation
        self.client = client
        self.objective = objective
        self.local_steps = local_steps
        self.batch_size = batch_size
        self.seed = seed
        self.visits = visits

    def steps(self, visit: int) -> list[tuple[Batch, ...]]:
        """The batches (D, D', D'', as many as the objective asks for) of each local step of a visit."""
        draws = [
            self.federation.batches(self.client, "D" + "'" * slot, visit, self.local_steps, self.batch_size, self.seed)
            for slot in range(self.objective.batches)
        ]
        return list(zip(*draws, strict=True))

    def train_dataloader(self) -> DataLoader[Any]:
        every_step = [step for visit in range(self.visits) for step in self.steps(visit)]
        return DataLoader(every_step, batch_size=None)  # type: ignore[arg-type]


def _wrong_gradient(objective: Objective, gradient: Any, w: Tensor) -> str:
    if isinstance(gradient, Tensor) and gradient.shape == w.shape:
        return f"{type(objective).__name__}.gradient must call f.gradient or f.hessian_vector at least once a step, and did not"
    got = f"one of shape {tuple(gradient.shape)}" if isinstance(gradient, Tensor) else shown(gradient)
    return f"{type(objective).__name__}.gradient must return a tensor of shape {tuple(w.shape)}, that of step.w; got {got}"


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass
