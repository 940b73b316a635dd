"""What users give as data, read as Datasets and what is known of whose their samples are."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from persafl_lit.data.federation import SPLITS, Split
from persafl_lit.data.indexed import Collate
from persafl_lit.data.trees import leaves, mapped
from persafl_lit.errors import DataError, located, shown

TAKES = (
    "a list with one entry per client (a Dataset, (train, val, test), a dict of them or a "
    "LightningDataModule), one Dataset, "
    "arrays (x, y) or (x, y, client), or a Federation"
)


@dataclass
class Holdings:
    """Datasets, and what is known of whose their samples are."""

    datasets: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    collates: list[Collate | None] = field(default_factory=list)
    clients: list[dict[Split, int]] | None = None
    """Of each client, the number of its dataset for each split; None is one dataset for all."""
    client_of: np.ndarray | None = None
    """Of each sample, where one dataset is for all."""
    split_of: np.ndarray | None = None
    """Likewise: 0, 1, 2 for train, val and test."""

    def add(self, value: Any, name: str) -> int:
        dataset, collate = _dataset(value, name)
        self.datasets.append(dataset)
        self.names.append(name)
        self.collates.append(collate)
        return len(self.datasets) - 1

    def shared(self) -> list[bool]:
        """Of each dataset, whether both training and evaluation read it."""
        shared = [True] * len(self.datasets)
        for splits in self.clients or ():
            for name, source in splits.items():
                shared[source] = name == "train" and len(splits) < len(SPLITS)
        return shared


def holdings_of(data: Any) -> Holdings:
    held = Holdings()
    if isinstance(data, list):
        if not data:
            raise DataError("data= is an empty list; it takes one entry per client")
        held.clients = [_client(entry, client, held) for client, entry in enumerate(data)]
        return held
    if isinstance(data, Mapping):
        unknown = [name for name in data if name not in ("x", "y", "client", "split", "collate_fn")]
        if unknown or "x" not in data or "y" not in data:
            raise DataError(
                f"a dict of arrays has x, y, and perhaps client and split; got {shown(sorted(map(str, data)))}"
            )
        held.add((data["x"], data["y"]), "the data")
        held.collates[0] = data.get("collate_fn")
        client_of, split_of = data.get("client"), data.get("split")
    else:
        client_of, split_of = (
            (last_as_clients(data), None) if isinstance(data, tuple) else (getattr(data, "clients", None), None)
        )
        if isinstance(data, tuple) and client_of is not None:
            data = data[0] if len(data) == 2 else data[:2]
        held.add(data, "the data")
    length = len(held.datasets[0])
    held.client_of = _column(client_of, "client", length)
    held.split_of = _split_column(_column(split_of, "split", length))
    return held


def last_as_clients(data: tuple[Any, ...]) -> Any:
    """The last of (x, y, client) and (dataset, client)."""
    if len(data) == 3 and not any(map(is_dataset, data)):
        return data[2]
    return data[1] if len(data) == 2 and is_dataset(data[0]) and not is_dataset(data[1]) else None


def _client(entry: Any, client: int, held: Holdings) -> dict[Split, int]:
    """The datasets of one client."""
    name = f"client {client}"
    collate = None
    if hasattr(entry, "train_dataloader") and hasattr(entry, "setup"):
        given = _loaders(entry, name)
    elif isinstance(entry, tuple) and len(entry) == 3 and all(is_dataset(part) or _is_arrays(part) for part in entry):
        given = dict(zip(SPLITS, entry, strict=True))
    elif isinstance(entry, Mapping):
        given = dict(entry)
        collate = given.pop("collate_fn", None)
        unknown = [key for key in given if key not in SPLITS]
        if unknown or "train" not in given:
            raise DataError(
                f"{name}: a dict has the keys train, val and test (train at least), and perhaps collate_fn; "
                f"got {shown(list(entry))}"
            )
    else:
        given = {"train": entry}
    whole = len(given) == 1
    found: dict[Split, int] = {}
    for part in SPLITS:
        if given.get(part) is not None:
            found[part] = held.add(given[part], name if whole else f"{name}, {part}")
            if collate is not None:
                held.collates[-1] = collate
    return found


def _loaders(module: Any, name: str) -> dict[Any, Any]:
    """A LightningDataModule's loaders, of which the dataset and the collate function count; batches are ours."""
    found: dict[Any, Any] = {}
    try:
        module.prepare_data()
        for stage in ("fit", "test"):
            module.setup(stage)
        for part in SPLITS:
            try:
                loader = getattr(module, f"{part}_dataloader")()
            except Exception as error:  # Lightning's own say that they are not there
                if part == "train" or "must be implemented" not in str(error):
                    raise
                continue
            if isinstance(loader, (list, tuple)) and len(loader) == 1:
                (loader,) = loader
            if loader is not None:
                found[part] = loader
    except (Exception, SystemExit) as error:
        raise DataError(f"{name}: the {type(module).__name__} fails: {located(error)}") from None
    if "train" not in found:
        raise DataError(f"{name}: the {type(module).__name__} has no train_dataloader")
    return found


def _dataset(value: Any, name: str) -> tuple[Any, Collate | None]:
    """A map-style dataset and its collate function, if it has one."""
    if isinstance(value, DataLoader):
        usual = torch.utils.data.default_collate
        return _dataset(value.dataset, name)[
            0
        ], None if value.collate_fn is usual or value.collate_fn is _usual_convert() else value.collate_fn
    if isinstance(value, IterableDataset):
        raise DataError(
            f"{name}: {type(value).__name__} is an IterableDataset; clients draw samples by index, so a "
            "map-style Dataset is needed"
        )
    if _is_arrays(value):
        return Rows(value[0], value[1], name), None
    if not is_dataset(value):
        raise DataError(f"{name}: {shown(value)} is no data; data= takes {TAKES}")
    return value, getattr(value, "collate_fn", None)


def _usual_convert() -> Any:
    from torch.utils.data._utils.collate import default_convert

    return default_convert


def is_dataset(value: Any) -> bool:
    if isinstance(value, (Dataset, DataLoader)):
        return True
    plain = isinstance(value, (str, bytes, list, tuple, Mapping, Tensor, np.ndarray, type))
    return not plain and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _is_arrays(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and not any(map(is_dataset, value))


class Rows(Dataset[Any]):
    """Arrays x and y: sample i is row i of each."""

    def __init__(self, x: Any, y: Any, name: str = "the data") -> None:
        self.x, self.y = mapped(lambda leaf: _tensor(leaf, f"{name}: x"), x), _tensor(y, f"{name}: y")
        if self.y.dim() and not self.y.is_floating_point():
            self.y = self.y.long()
        lengths = [len(leaf) if leaf.dim() else 0 for leaf in leaves((self.x, self.y))]
        if len(set(lengths)) != 1 or self.y.dim() == 0:
            rows = ", ".join(map(str, dict.fromkeys(lengths[:-1])))
            raise DataError(f"{name}: x has {rows} rows and y has {lengths[-1]}; they need as many as each other")

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return mapped(lambda leaf: leaf[index], self.x), self.y[index]


def _tensor(value: Any, name: str) -> Tensor:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about arrays that cannot be written: nobody writes
            return value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.asanyarray(value))
    except (TypeError, ValueError, RuntimeError):
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise DataError(f"{name} must be numbers; got {kind}") from None


def _column(values: Any, name: str, length: int) -> np.ndarray | None:
    """What is said of each sample."""
    if values is None:
        return None
    column = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
    if column.shape != (length,) or column.dtype.kind not in "iubUS":
        raise DataError(
            f"{name} must be a whole number or a text for each of the {length} samples; got {column.dtype} of "
            f"the shape {column.shape}"
        )
    return column


def _split_column(column: np.ndarray | None) -> np.ndarray | None:
    if column is None:
        return None
    numbers: dict[str, int] = {key: number for number, name in enumerate(SPLITS) for key in (name, str(number))}
    found = [numbers.get(str(value)) for value in column.tolist()]
    if None in found:
        index = found.index(None)
        raise DataError(
            f"split must be train, val or test (or 0, 1, 2) for each sample; sample {index} has "
            f"{shown(column.tolist()[index])}"
        )
    return np.array(found)
