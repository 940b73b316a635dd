"""MNIST, Fashion-MNIST and CIFAR-10, dealt to clients. `persafl data NAME` gets the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from persafl_lit.data.manifest import IMAGE_SETS, verified_files
from persafl_lit.data.partition import Partitioned
from persafl_lit.errors import ConfigError

if TYPE_CHECKING:
    from persafl_lit.data.federation import Samples


@dataclass(frozen=True)
class Images(Partitioned):
    """Training and test images pooled, then dealt: every client has train, val and test splits of its own
    distribution."""

    root: str = "data"
    """Folder of the files, in torchvision's layout."""
    memory: float = 0.0
    """Megabytes up to which all images are normalised once instead of batch by batch. Worker processes share that copy;
    Ray's hold one each."""

    name: ClassVar[str]
    shape: ClassVar[tuple[int, ...]] = (1, 28, 28)
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.memory >= 0:
            raise ConfigError(f"data.memory must be >= 0 megabytes; got {self.memory!r}")

    def read_labels(self) -> np.ndarray:
        return self._labels(verified_files(self.name, self.root))

    def _labels(self, paths: Sequence[Path]) -> np.ndarray:
        if self.name == "cifar10":
            found = [np.memmap(path, np.uint8, "r").reshape(-1, 3073)[:, 0] for path in paths]
        else:
            found = [np.fromfile(path, np.uint8, offset=8) for path in paths[1::2]]
        return np.concatenate(found).astype(np.int64)

    def federation(self, clients: int | None, seed: int) -> Samples:
        from persafl_lit.data.federation import dealt
        from persafl_lit.data.pixels import Pixels, read_cifar, read_idx

        paths = verified_files(self.name, self.root)
        pixels = Pixels((read_cifar if self.name == "cifar10" else read_idx)(paths), self.mean, self.std)
        inputs = pixels.normalised() if pixels.nbytes() <= self.memory * 1e6 else pixels
        fingerprint = ",".join(IMAGE_SETS[self.name].files.values())
        return dealt(inputs, self.shares(self._labels(paths), clients, seed), fingerprint)


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
    shape: ClassVar[tuple[int, ...]] = (3, 32, 32)
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
