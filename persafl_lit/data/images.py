"""MNIST, Fashion-MNIST and CIFAR-10, dealt to clients. `persafl data NAME` gets the files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from persafl_lit.data.digits import Partitioned, deal
from persafl_lit.data.federation import Samples
from persafl_lit.data.pixels import Pixels, read_cifar, read_idx
from persafl_lit.data.sources import IMAGE_SETS, located
from persafl_lit.errors import ConfigError


@dataclass(frozen=True)
class Images(Partitioned):
    """Training and test images pooled, then dealt: every client has train, val and test splits of its own distribution."""

    root: str = "data"
    """Folder of the files, in torchvision's layout."""
    memory: float = 0.0
    """Megabytes up to which all images are normalised once, in every process, instead of batch by batch."""

    name: ClassVar[str]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.memory >= 0:
            raise ConfigError(f"data.memory must be >= 0 megabytes; got {self.memory!r}")

    def federation(self, clients: int | None, seed: int) -> Samples:
        paths = located(self.name, self.root)
        pieces, labels = (read_cifar if self.name == "cifar10" else read_idx)(paths)
        pixels = Pixels(pieces, self.mean, self.std)
        inputs = pixels.normalised() if pixels.nbytes() <= self.memory * 1e6 else pixels
        fingerprint = ",".join(IMAGE_SETS[self.name].files.values())
        return deal(inputs, labels, self, self.count(clients), seed, fingerprint)


@dataclass(frozen=True)
class Mnist(Images):
    """The paper's first data set, with c = 5 classes per client."""

    name: ClassVar[str] = "mnist"
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)


@dataclass(frozen=True)
class FashionMnist(Images):
    """MNIST's format with harder pictures."""

    name: ClassVar[str] = "fashion_mnist"
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)


@dataclass(frozen=True)
class Cifar10(Images):
    """The paper's second data set, with c = 3 classes per client."""

    classes_per_client: int = 3
    name: ClassVar[str] = "cifar10"
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
