"""Images in folders by client and class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from persafl_lit.data.given import Given
from persafl_lit.errors import ConfigError, DataError, first_line, shown

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
SPLIT_NAMES = {"train", "val", "test"}


@dataclass(frozen=True, kw_only=True)
class Folder(Given):
    """Images in ROOT/client/class/*.png, or in ROOT/train/client/class/*.png with val and test beside it. Folders are
    clients and classes by name."""

    root: str
    """Folder of the clients' folders, or of train, val and test with these."""
    channels: Literal["gray", "rgb", "first"] = "first"
    """Images as gray or rgb; `first` is as the first image is."""
    size: int | None = None
    """Side in pixels to which images are scaled; null leaves them as they are, and they must be alike."""
    mean: float = 0.5
    """Pixels from 0 to 1 have this subtracted."""
    std: float = 0.5
    """And are divided by this."""
    augment: tuple[str, ...] = ()
    """Random changes of training images: `flip` (left and right), `crop` (moved by up to an eighth)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None and not 1 <= self.size <= 4096:
            raise ConfigError(f"data.size must lie between 1 and 4096 pixels, or be null; got {self.size}")
        if not self.std > 0:
            raise ConfigError(f"data.std must be > 0; got {self.std!r}")
        for name in self.augment:
            if name not in ("flip", "crop"):
                raise ConfigError(f"data.augment takes flip and crop; got {shown(name)}")

    def load(self) -> Any:
        from persafl_lit.data.augmented import Augmented

        clients = self._files()
        kinds = sorted({kind for splits in clients.values() for files in splits.values() for kind, _ in files})
        gray = self.channels == "gray" or (self.channels == "first" and _is_gray(next(_paths(clients))))
        entries = []
        for splits in clients.values():
            entry: dict[str, Any] = {
                name: ImageFiles(
                    [path for _, path in files],
                    [kinds.index(kind) for kind, _ in files],
                    gray,
                    self.size,
                    self.mean,
                    self.std,
                )
                for name, files in splits.items()
            }
            if self.augment:
                entry["train"] = Augmented(entry["train"], Augment(self.augment))
            entries.append(entry)
        return entries

    def _files(self) -> dict[str, dict[str, list[tuple[str, Path]]]]:
        """Of each client and split, (class, file)."""
        root = Path(self.root)
        top = _folders(root, "data.root")
        if not top:
            raise DataError(
                f"data.root={shown(self.root)} has no folders in it; images are looked for in "
                f"{self.root}/client/class/*.png"
            )
        names = {path.name for path in top}
        by_split = {path.name: path for path in top} if "train" in names <= SPLIT_NAMES else {"train": root}
        clients: dict[str, dict[str, list[tuple[str, Path]]]] = {}
        for name, place in by_split.items():
            for client in _folders(place, "data.root"):
                files = [(kind.name, path) for kind in _folders(client, "data.root") for path in _images(kind)]
                if not files:
                    raise DataError(f"client {shown(client.name)} has no images: none in {client}/CLASS/*.png")
                clients.setdefault(client.name, {})[name] = files
        for client_name, splits in clients.items():
            missing = [name for name in by_split if name not in splits]
            if missing:
                raise DataError(f"client {shown(client_name)} has no folder in {by_split[missing[0]]}")
        if not clients:
            raise DataError(
                f"data.root={shown(self.root)} has no clients: images are looked for in {self.root}/client/class/*.png"
            )
        return dict(sorted(clients.items()))


def _folders(place: Path, key: str) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot look into {key}={shown(str(place))}: {getattr(error, 'strerror', None) or error}"
        ) from None


def _images(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())


def _paths(clients: dict[str, dict[str, list[tuple[str, Path]]]]) -> Iterator[Path]:
    return (path for splits in clients.values() for files in splits.values() for _, path in files)


def _is_gray(path: Path) -> bool:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.mode in ("1", "L", "I", "I;16", "F")
    except Exception as error:  # a damaged image can raise anything
        raise DataError(f"cannot read the image {path}: {first_line(error)}") from None


class ImageFiles:
    """A map-style dataset of image files: (tensor of channels, height, width; label). A file is opened when it is
    read."""

    def __init__(
        self, paths: list[Path], targets: list[int], gray: bool, size: int | None, mean: float, std: float
    ) -> None:
        self.paths = [os.fspath(path) for path in paths]
        self.targets = targets
        self.gray, self.size, self.mean, self.std = gray, size, mean, std

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import torch
        from PIL import Image

        try:
            with Image.open(self.paths[index]) as file:
                image = file.convert("L" if self.gray else "RGB")
            pixels = np.asarray(image if self.size is None else image.resize((self.size, self.size)), dtype=np.float32)
        except Exception as error:  # a damaged image can raise anything
            raise DataError(f"cannot read the image {self.paths[index]}: {first_line(error)}") from None
        tensor = torch.from_numpy((pixels / 255 - self.mean) / self.std)
        return tensor[None] if self.gray else tensor.permute(2, 0, 1).contiguous(), self.targets[index]


class Augment:
    """Random changes of an image, drawn from torch's own generator."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, image: Tensor) -> Tensor:
        import torch
        from torch.nn import functional as F

        if "flip" in self.names and torch.rand(()) < 0.5:
            image = image.flip(-1)
        if "crop" in self.names:
            height, width = image.shape[-2:]
            edge = max(1, min(height, width) // 8)
            top, left = torch.randint(2 * edge + 1, (2,)).tolist()
            image = F.pad(image[None], (edge,) * 4, mode="replicate")[
                0, :, top : top + height, left : left + width
            ].contiguous()
        return image
