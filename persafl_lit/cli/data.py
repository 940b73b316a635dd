"""`persafl data` and `persafl list`: what there is."""

from __future__ import annotations

import argparse

from persafl_lit.cli.files import atomically, picture, picture_format
from persafl_lit.errors import ConfigError, closest


def data(options: argparse.Namespace) -> int:
    from persafl_lit.config import choices, compose

    if options.name not in choices("data") or options.name == "quadratic":
        known = [name for name in choices("data") if name != "quadratic"]
        raise ConfigError(f"unknown data set {options.name!r}; there are {', '.join(known)}.{closest(options.name, known)}")
    config = compose([*options.overrides, f"data={options.name}"])
    png = picture(options.png or f"{options.name}.png")
    assert png is not None
    from persafl_lit.data import DATASETS
    from persafl_lit.report.labels import draw_labels

    settings = config.build("data", DATASETS)
    origin = _prepare(options.name, settings.root) if "root" in config.data else "embedded in scikit-learn"
    federation = settings.federation(config.clients, config.seed)
    federation.trained()
    counts, sizes = federation.label_counts(), federation.sizes()
    print(f"{options.name}: {origin}; {len(federation.labels)} images of {'x'.join(map(str, federation.shape))}, checked")
    print("samples per class: " + ", ".join(f"{kind}: {count}" for kind, count in enumerate(federation.labels.bincount().tolist())))
    print(f"{federation.clients} clients hold {sizes.sum(axis=1).min()} to {sizes.sum(axis=1).max()} samples each", end="")
    print(f" ({', '.join(f'{name} {total}' for name, total in zip(('train', 'val', 'test'), sizes.sum(axis=0), strict=True))})")
    for note in federation.notes:
        print(f"note: {note}")
    title = f"{options.name}: {config.data['partition']}, seed {config.seed}"
    atomically(png, lambda file: draw_labels(counts, title, file, federation.holdout, picture_format(png)))
    print(f"who holds what: {png}")
    return 0


def _prepare(name: str, root: str) -> str:
    """Get the files, with a word on what is tried and how much has come."""
    from rich.console import Console

    from persafl_lit.data.sources import prepare

    console = Console(stderr=True, highlight=False)
    with console.status(f"{name}: looking in {root}") as status:
        return prepare(name, root, say=console.print, tick=lambda size: status.update(f"{name}: {size / 1e6:.0f} MB"))


def listing(options: argparse.Namespace) -> int:
    from persafl_lit.cli.sweep import sweeps
    from persafl_lit.config import choices

    titles = {
        "method": "method=",
        "data": "data=",
        "model": "model=",
        "schedule": "schedule=",
        "delays": "delays=",
        "finetune": "eval.finetune=",
        "experiment": "experiment=  (several settings at once)",
    }
    for group, title in titles.items():
        print(title)
        for name, line in choices(group).items():
            print(f"  {name:<16} {line}")
        print()
    print("persafl sweep")
    for name, path in sweeps().items():
        print(f"  {name:<16} {path.read_text(encoding='utf-8').partition(chr(10))[0].lstrip('# ')}")
    return 0
