"""`persafl data` and `persafl list`: prepare and describe a data set, list all choices."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persafl_lit import __version__
from persafl_lit.cli.files import picture, picture_format, write_file
from persafl_lit.common.fields import first_paragraph
from persafl_lit.errors import ConfigError, Interrupted, closest

if TYPE_CHECKING:
    from persafl_lit.config.compose import Config
    from persafl_lit.data.partition import Shares

PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


def data(options: argparse.Namespace) -> int:
    with _on_signals(_interrupt):
        return _data(options)


def _data(options: argparse.Namespace) -> int:
    from persafl_lit.config.compose import choices, compose

    if options.name not in choices("data") or options.name == "quadratic":
        known = [name for name in choices("data") if name != "quadratic"]
        raise ConfigError(
            f"unknown data set {options.name!r}; there are {', '.join(known)}.{closest(options.name, known)}"
        )
    config = compose([*options.overrides, f"data={options.name}"])
    png = picture(options.png or f"{options.name}.png")
    assert png is not None
    from persafl_lit.data.partition import Partitioned, trained

    settings: Any = config.build("data")
    if not isinstance(settings, Partitioned):
        return _describe(config, options.name, png)
    origin = (
        _prepare(options.name, config.data["root"], options.quiet)
        if "root" in config.data
        else "embedded in scikit-learn"
    )
    shares = settings.shares(settings.read_labels(), config.clients, config.seed)
    trained(len(shares.parts), shares.holdout)
    per_client, per_split = shares.sizes().sum(axis=1), shares.sizes().sum(axis=0)
    print(f"{options.name}: {origin}; {len(shares.labels)} images of {'x'.join(map(str, settings.shape))}, checked")
    print(
        "samples per class: "
        + ", ".join(f"{kind}: {count}" for kind, count in enumerate(shares.class_sizes().tolist()))
    )
    print(f"{len(shares.parts)} clients hold {per_client.min()} to {per_client.max()} samples each", end="")
    print(f" ({', '.join(f'{name} {total}' for name, total in zip(('train', 'val', 'test'), per_split, strict=True))})")
    for note in shares.notes:
        print(f"note: {note}")
    _draw(shares, f"{options.name}: {config.data['partition']}, seed {config.seed}", png)
    print(f"who holds what: {png}")
    return 0


def _describe(config: Config, name: str, png: Path) -> int:
    """Data of the user's, or generated: who holds what, and of which class where there are classes."""
    import numpy as np

    from persafl_lit.data.partition import Shares

    federation = config.federation()
    sizes = federation.sizes()
    per_client, per_split = sizes.sum(axis=1), sizes.sum(axis=0)
    shape = "x".join(map(str, getattr(federation, "shape", ())))
    print(
        f"{name}: {per_client.sum()} samples{f' of {shape}' if shape else ''}, "
        f"{getattr(federation, 'task', 'classification')}"
    )
    print(f"{federation.clients} clients hold {per_client.min()} to {per_client.max()} samples each", end="")
    print(f" ({', '.join(f'{part} {total}' for part, total in zip(('train', 'val', 'test'), per_split, strict=True))})")
    for note in federation.notes:
        print(f"note: {note}")
    labels = getattr(federation, "labels", None)
    if labels is not None and getattr(federation, "task", "") == "classification":
        pieces: list[Any] = [
            tuple(np.asarray(part[split]) for split in ("train", "val", "test"))
            for part in getattr(federation, "parts", ())
        ]
        _draw(Shares(labels.numpy(), pieces, federation.holdout), f"{name}, seed {config.seed}", png)
        print(f"who holds what: {png}")
    return 0


def _prepare(name: str, root: str, quiet: bool) -> str:
    """Get the files; what is tried and how much has come is shown on stderr."""
    from rich.console import Console

    from persafl_lit.data.download import prepare

    console = Console(stderr=True, highlight=False, quiet=quiet)
    asked = False

    def ask() -> None:
        nonlocal asked
        asked = True

    def tick(size: int) -> None:
        if asked:
            raise KeyboardInterrupt
        status.update(f"{name}: {size / 1e6:.0f} MB")

    # A signal takes effect at the next tick, not at once: the client is ended and the temporary folder removed without
    # disturbance.
    with console.status(f"{name}: looking in {root}") as status, _on_signals(ask):
        try:
            origin = prepare(name, root, say=console.print, tick=tick)
        except KeyboardInterrupt:
            raise Interrupted(
                f"{name}: stopped before all of it was there; nothing of it is left in data.root={root}"
            ) from None
    if asked:
        raise KeyboardInterrupt
    return origin


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _on_signals(act: Callable[[], None]) -> Iterator[None]:
    """Act on SIGINT and SIGTERM, and on SIGHUP unless it is ignored, as nohup has it."""
    numbers = [
        signal.SIGINT,
        signal.SIGTERM,
        *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]),
    ]
    before = {number: signal.signal(number, lambda *_: act()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _draw(shares: Shares, title: str, path: Path) -> None:
    """Draw who holds what, unless this very picture is there: a PNG ends with a digest of what it shows."""
    counts, format = shares.label_counts(), picture_format(path)
    shown = f"{__version__}, {title}, {shares.holdout}, {counts.tolist()}"
    text = b"tEXtpersafl\0" + hashlib.sha256(shown.encode()).hexdigest().encode()
    end = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big") + PNG_END
    if format == "png" and _ends_with(path, end):
        return
    from persafl_lit.report.label_counts import draw_labels

    drawn = io.BytesIO()
    draw_labels(counts, title, drawn, shares.holdout, format)
    content = drawn.getvalue()
    write_file(path, lambda file: file.write(content.removesuffix(PNG_END) + end if format == "png" else content))


def _ends_with(path: Path, end: bytes) -> bool:
    with contextlib.suppress(OSError):  # it is shorter, or not to be read
        if path.is_file():
            with open(path, "rb") as file:
                file.seek(-len(end), os.SEEK_END)
                return file.read() == end
    return False


LISTED = {
    "method": "method=",
    "method.objective": "method.objective=  (what a client computes)",
    "method.rule": "method.rule=  (how updates enter the shared model)",
    "method.personal": "method.personal=  (the model that a client keeps beside the shared one)",
    "data": "data=",
    "model": "model=",
    "schedule": "schedule=",
    "delays": "delays=",
    "eval.finetune": "eval.finetune=",
    "eval.metrics": "eval.metrics=[...]  (beside loss and accuracy)",
    "callbacks": "callbacks=[...]",
    "loggers": "loggers=[...]",
    "experiment": "experiment=  (several settings at once)",
}


def listing(options: argparse.Namespace) -> int:
    from persafl_lit.cli.sweep import sweeps

    for key, title in LISTED.items():
        if found := choices_of(key):
            print(title)
            for name, (line, origin) in sorted(found.items(), key=lambda item: bool(item[1][1])):
                print(f"  {name:<16} {line}{f'  ({origin})' if origin else ''}")
            print()
    print("persafl sweep")
    for name, path in sweeps().items():
        print(f"  {name:<16} {path.read_text(encoding='utf-8').partition(chr(10))[0].lstrip('# ')}")
    return 0


def choices_of(key: str) -> dict[str, tuple[str, str]]:
    """The choices of a key: what each is, and where it comes from unless it is ours. One that cannot be imported is
    warned about."""
    from persafl_lit.common.plugins import conf_of_packages, offered, package_of, warn_once
    from persafl_lit.config.parse import conf_folders, files, first_comment, our_conf
    from persafl_lit.config.paths import GROUPS
    from persafl_lit.config.registry import TABLES, resolve
    from persafl_lit.learning.metric_names import FURTHER_METRICS

    origins = {folder: f"folder {folder}" for folder in conf_folders()} | {our_conf(): ""}
    origins |= {folder: f"package {name}" for folder, name in conf_of_packages().items()}
    found: dict[str, tuple[str, str]] = {}
    if key in GROUPS or key == "experiment":
        for name, path in files(GROUPS.get(key, key), list(origins)).items():
            found[name] = first_comment(path), origins[path.parent.parent]
    if key not in TABLES:
        return found
    table = TABLES[key]
    if key not in GROUPS:
        lines = FURTHER_METRICS if key == "eval.metrics" else {}
        found |= {name: (lines.get(name) or _about(ours), "") for name, ours in table.ours.items()}
    for name, entries in offered(table.kind).items():
        origin = "package " + " and ".join(map(package_of, entries))
        if name in table.ours:
            warn_once(f"{key}={name} is ours; that of {origin} is not used")
        elif name not in found:
            try:
                found[name] = _about(resolve(key, name)), origin
            except ConfigError as error:
                warn_once(str(error))
    return found


def _about(cls: Any) -> str:
    """The first paragraph of a class's docstring, or a path."""
    return cls if isinstance(cls, str) else first_paragraph(cls)
