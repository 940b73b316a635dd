"""Fine-tune, then evaluate: personalised accuracy per client.

The fine-tuning rule is separate from the training method, so that every method gets the same personalisation budget. It sees
only training data; validation and test splits are only ever measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from persafl_lit.data.federation import Batch, Federation, Split
from persafl_lit.errors import ConfigError
from persafl_lit.loss import FlatLoss, step_loss
from persafl_lit.objectives import Moreau
from persafl_lit.streams import torch_seed

if TYPE_CHECKING:
    from persafl_lit.client import ClientModule

CHUNK = 1024


@dataclass(frozen=True)
class Finetune:
    """How a client makes the shared model its own before it is evaluated: not at all."""

    steps: ClassVar[int] = 0
    """Minibatches it uses."""

    def personalise(self, client: ClientModule, w: Tensor, batches: Sequence[Batch], whole: Sequence[tuple[Batch, int]]) -> Tensor:
        return w


@dataclass(frozen=True)
class Sgd(Finetune):
    """`steps` stochastic gradient steps; lr null is the run's eta. The paper's protocol, with the budget of Q local steps."""

    steps: int = 10  # type: ignore[misc]
    lr: float | None = None

    def __post_init__(self) -> None:
        _check(steps=self.steps, lr=self.lr)

    def personalise(self, client: ClientModule, w: Tensor, batches: Sequence[Batch], whole: Sequence[tuple[Batch, int]]) -> Tensor:
        theta = client.f.at(w)
        for batch in batches:
            theta.sub_(client.f.gradient(theta, batch), alpha=self.lr or client.eta)
        return theta


@dataclass(frozen=True)
class MamlStep(Finetune):
    """One step with the gradient over all training data: w - alpha grad f_i(w), what MAML optimises for."""

    alpha: float = 0.01

    def __post_init__(self) -> None:
        _check(alpha=self.alpha)

    def personalise(self, client: ClientModule, w: Tensor, batches: Sequence[Batch], whole: Sequence[tuple[Batch, int]]) -> Tensor:
        return w - self.alpha * client.whole_gradient(w, whole)


@dataclass(frozen=True)
class Prox(Finetune):
    """theta_i(w): `inner_steps` stochastic steps on f_i(theta) + lam/2 |theta - w|^2, what the Moreau envelope optimises for."""

    inner_steps: int = 10
    lam: float = 25.0
    lr: float | None = None

    def __post_init__(self) -> None:
        _check(inner_steps=self.inner_steps, lam=self.lam, lr=self.lr)
        if self.lr is not None and self.lr >= 2 / self.lam:
            raise ConfigError(f"eval.finetune.lr={self.lr:g} diverges with eval.finetune.lam={self.lam:g}: it must be below {2 / self.lam:g}")

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.inner_steps

    def personalise(self, client: ClientModule, w: Tensor, batches: Sequence[Batch], whole: Sequence[tuple[Batch, int]]) -> Tensor:
        theta = client.f.at(w)
        lr = Moreau(lam=self.lam, inner_lr=self.lr).step_size(client.f.smoothness)
        for batch in batches:
            slope = client.f.gradient(theta, batch).add_(theta - w, alpha=self.lam)
            theta.sub_(slope, alpha=lr)
        return theta


FINETUNES: dict[str, type[Finetune]] = {"none": Finetune, "sgd": Sgd, "maml": MamlStep, "prox": Prox}


def _check(**values: float | int | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"eval.finetune.{name} must be > 0; got {value!r}")


# -- scores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """One client at one moment: after fine-tuning on validation and test data, and the shared model as it is on test data.

    Accuracies are nan where the task has no classes.
    """

    val_accuracy: float
    test_accuracy: float
    global_accuracy: float
    val_loss: float
    test_loss: float
    global_loss: float


@dataclass(frozen=True)
class Point:
    """All clients at one moment of simulated time."""

    sim_time: float
    updates: int
    scores: tuple[Scores, ...]
    training: dict[str, float]
    """What training cost in all and saw since the last point."""
    held_out: tuple[Scores, ...] = ()
    """The clients that never train."""

    def accuracy(self) -> dict[str, float]:
        """Of the clients that train."""
        return accuracy_of(self.scores)

    def loss(self) -> dict[str, float]:
        return loss_of(self.scores)

    def metrics(self) -> dict[str, float]:
        """Everything under the names of the tracked metrics."""
        groups = {"accuracy": self.accuracy(), "loss": self.loss()}
        if self.held_out:
            groups |= {"holdout.accuracy": accuracy_of(self.held_out), "holdout.loss": loss_of(self.held_out)}
        return {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()} | self.training

    def table(self) -> list[dict[str, float]]:
        return [{"client": client, **asdict(score)} for client, score in enumerate(self.scores + self.held_out)]


def accuracy_of(scores: Sequence[Scores]) -> dict[str, float]:
    """Means over clients; `std` and `worst_decile` describe the test accuracy after fine-tuning."""
    test = np.array([score.test_accuracy for score in scores])
    return {
        "val": float(np.mean([score.val_accuracy for score in scores])),
        "test": float(test.mean()),
        "std": float(test.std()),
        "worst_decile": float(np.sort(test)[: max(1, len(test) // 10)].mean()),
        "global": float(np.mean([score.global_accuracy for score in scores])),
    }


def loss_of(scores: Sequence[Scores]) -> dict[str, float]:
    """Means over clients."""
    return {name: float(np.mean([getattr(score, f"{name}_loss") for score in scores])) for name in ("val", "test", "global")}


def evaluate_client(client: ClientModule, federation: Federation, number: int, w: Tensor, rule: Finetune, batch_size: int, seed: int) -> Scores:
    """Fine-tune one client from w and measure; nothing it does changes w."""
    before = measure(client.f, federation, number, "test", w)
    client.backbone.train()
    batches = federation.batches(number, "finetune", 0, rule.steps, batch_size, seed) if rule.steps else []
    whole = whole_batches(federation, number, batch_size, seed)
    own = rule.personalise(client, w, batches, whole)
    client.f.losses.clear()
    val, test = (measure(client.f, federation, number, split, own) for split in ("val", "test"))
    return Scores(val[1], test[1], before[1], val[0], test[0], before[0])


def whole_batches(federation: Federation, client: int, batch_size: int, seed: int) -> list[tuple[Batch, int]]:
    """All of a client's training data in batches, with the number of samples in each."""
    chunks = federation.whole(client, "train", batch_size)
    return [(Batch(data, torch_seed(seed, "mask whole", client, chunk)), count) for chunk, (data, count) in enumerate(chunks)]


def measure(f: FlatLoss, federation: Federation, client: int, split: Split, w: Tensor) -> tuple[float, float]:
    """(loss, accuracy) of w on a client's split, without dropout."""
    f.at(w)
    f.backbone.eval()
    loss = hits = total = 0.0
    with torch.no_grad():
        for data, count in federation.whole(client, split, CHUNK):
            chunk_loss, chunk_hits = _loss_and_hits(f.backbone, data)
            loss, hits, total = loss + chunk_loss * count, hits + chunk_hits, total + count
    return loss / total, hits / total


def _loss_and_hits(backbone: nn.Module, data: Sequence[Tensor]) -> tuple[float, float]:
    """The mean loss and the number of right answers; the latter is nan for a task without classes."""
    if len(data) != 2 or data[1].is_floating_point():
        return float(step_loss(backbone, data)), float("nan")
    inputs, labels = data
    try:
        scores = backbone(inputs)
    except NotImplementedError:
        return float(step_loss(backbone, data)), float("nan")
    score_loss: Any = getattr(backbone, "score_loss", None)
    loss = step_loss(backbone, data) if score_loss is None else score_loss(scores, labels)
    return float(loss), float((scores.argmax(dim=1) == labels).sum())
