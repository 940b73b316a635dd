"""Users' data as a federation: Datasets, arrays, LightningDataModules, one per client or one for all.

Samples that fit into memory are read once and become `Samples`, the fast path of the built-in sets; others stay
Datasets, which `Indexed` reads when a batch is drawn. Both draw the same batches.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from persafl_lit.common.seeding import rng
from persafl_lit.data.augmented import Augmented, has_random_transform, without_random
from persafl_lit.data.federation import IGNORED, SPLITS, Federation, Samples, Split, Task
from persafl_lit.data.indexed import Collate, Indexed, Sources, sample_of, seeded
from persafl_lit.data.partition import NATURAL, SMALLEST, Pieces, set_aside, split, trained
from persafl_lit.data.trees import Nested, add_to, digest, layout, leaves, mapped, nbytes
from persafl_lit.errors import ConfigError, DataError, located, shown

if TYPE_CHECKING:
    from persafl_lit.data.given import Given

MANY_CLASSES = 10_000
"""More than these, and more than there are labels, is taken for a mistake unless `data.classes` says so."""
PROBED = 64
"""Samples that are read more than once to see whether they change."""
BLOCK = 256
"""Samples that are read before they are put into memory."""
HASHED = 1024
"""Samples of data that is read by index whose bytes are part of the digest."""
TAKES = (
    "a list with one entry per client (a Dataset, (train, val, test), a dict of them or a "
    "LightningDataModule), one Dataset, "
    "arrays (x, y) or (x, y, client), or a Federation"
)


def adapt(data: Any, settings: Given, clients: int | None, seed: int) -> Federation:
    """A federation of what `run(data=...)` takes. `clients` is how many were asked for; None is as many as there
    are."""
    if isinstance(data, Federation):
        trained(data.clients, data.holdout)
        return data
    holdings = _holdings(data)
    sources = Sources(holdings.datasets, holdings.names, holdings.collates)
    for name, length in zip(sources.names, sources.lengths, strict=True):
        if not length:
            raise DataError(f"{name} has no samples")
    firsts = _firsts(sources)
    changes = _changing(sources)
    notes = _unaugment(sources, changes, holdings.shared())
    in_memory = not any(changes) and all(map(_is_pair, firsts)) and not any(sources.collates)
    in_memory = (
        in_memory
        and sum(nbytes(first) * length for first, length in zip(firsts, sources.lengths, strict=True))
        <= settings.in_memory * 1e6
    )
    inputs, labels = _collected(sources) if in_memory else (None, _labels(sources, firsts))
    _check_labels(labels, settings.classes, sources)
    parts, left_out = _parts(holdings, sources, labels, settings, clients, seed)
    trained(len(parts), settings.holdout_clients)
    notes += left_out
    classes = _classes(labels, settings.classes)
    tensors = [{name: torch.from_numpy(piece) for name, piece in zip(SPLITS, pieces, strict=True)} for pieces in parts]
    if in_memory:
        assert labels is not None
        whole = inputs if isinstance(inputs, Tensor) else Nested(inputs)
        return Samples(whole, labels, classes, tensors, digest(inputs), settings.holdout_clients, notes)
    return Indexed(
        sources,
        tensors,
        classes,
        _task(firsts[0], labels),
        _shape(firsts[0]),
        _sampled_digest(sources, labels),
        any(changes),
        settings.holdout_clients,
        notes,
    )


def brings_clients(data: Any) -> bool:
    """Whether the data itself says how many clients there are."""
    if isinstance(data, Mapping):
        return "client" in data
    return (
        isinstance(data, (list, Federation))
        or (isinstance(data, tuple) and _client_of(data) is not None)
        or hasattr(data, "clients")
    )


def described(data: Any) -> str:
    """A name for the record of a run."""
    if isinstance(data, list):
        return f"list of {len(data)}: {described(data[0])}" if data else "empty list"
    if isinstance(data, tuple):
        return f"({', '.join(map(described, data))})"
    return f"{type(data).__module__}.{type(data).__qualname__}"


# -- what is held -----------------------------------------------------------------------------------------------------


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


def _holdings(data: Any) -> Holdings:
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
            (_client_of(data), None) if isinstance(data, tuple) else (getattr(data, "clients", None), None)
        )
        if isinstance(data, tuple) and client_of is not None:
            data = data[0] if len(data) == 2 else data[:2]
        held.add(data, "the data")
    length = len(held.datasets[0])
    held.client_of = _column(client_of, "client", length)
    held.split_of = _split_column(_column(split_of, "split", length))
    return held


def _client_of(data: tuple[Any, ...]) -> Any:
    """The last of (x, y, client) and (dataset, client)."""
    if len(data) == 3 and not any(map(_is_dataset, data)):
        return data[2]
    return data[1] if len(data) == 2 and _is_dataset(data[0]) and not _is_dataset(data[1]) else None


def _client(entry: Any, client: int, held: Holdings) -> dict[Split, int]:
    """The datasets of one client."""
    name = f"client {client}"
    collate = None
    if hasattr(entry, "train_dataloader") and hasattr(entry, "setup"):
        given = _loaders(entry, name)
    elif isinstance(entry, tuple) and len(entry) == 3 and all(_is_dataset(part) or _is_arrays(part) for part in entry):
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
    if not _is_dataset(value):
        raise DataError(f"{name}: {shown(value)} is no data; data= takes {TAKES}")
    return value, getattr(value, "collate_fn", None)


def _usual_convert() -> Any:
    from torch.utils.data._utils.collate import default_convert

    return default_convert


def _is_dataset(value: Any) -> bool:
    if isinstance(value, (Dataset, DataLoader)):
        return True
    plain = isinstance(value, (str, bytes, list, tuple, Mapping, Tensor, np.ndarray, type))
    return not plain and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _is_arrays(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and not any(map(_is_dataset, value))


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


# -- samples ----------------------------------------------------------------------------------------------------------


def _is_pair(sample: Any) -> bool:
    """(inputs, target) of numbers, which can be stacked."""
    return (
        isinstance(sample, (tuple, list))
        and len(sample) == 2
        and all(map(_is_number, leaves(sample)))
        and not isinstance(sample[1], Mapping)
    )


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, bool, int, float, np.number, np.bool_)) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    )


def _firsts(sources: Sources) -> list[Any]:
    """The first sample of each dataset; they must be alike."""
    with seeded(0):
        firsts = [sample_of(dataset, 0, name) for dataset, name in zip(sources.datasets, sources.names, strict=True)]
    for first, name, collate in zip(firsts, sources.names, sources.collates, strict=True):
        odd = next((leaf for leaf in leaves(first) if not _is_number(leaf)), None)
        if odd is not None and collate is None and not isinstance(odd, (str, bytes)):
            raise DataError(
                f"{name}: sample 0 holds a {type(odd).__name__}, of which no batch can be made; "
                "give the Dataset a transform that makes tensors, or a collate_fn"
            )
        if collate is None and sources.collates[0] is None and _inputs_layout(first) != _inputs_layout(firsts[0]):
            raise DataError(
                f"clients of different shapes: samples of {name} are {_inputs_layout(first)}, those of "
                f"{sources.names[0]} {_inputs_layout(firsts[0])}"
            )
    return firsts


def _inputs_layout(sample: Any) -> str:
    return layout(sample[0] if isinstance(sample, (tuple, list)) and len(sample) == 2 else sample)


def _collected(sources: Sources) -> tuple[Any, Tensor]:
    """All inputs and all targets, one row per sample."""
    parts = [
        _rows_of(dataset) or _read_all(dataset, name)
        for dataset, name in zip(sources.datasets, sources.names, strict=True)
    ]
    kinds = [(layout(mapped(lambda leaf: leaf[:0], x)), y.is_floating_point(), tuple(y.shape[1:])) for x, y in parts]
    for kind, name in zip(kinds, sources.names, strict=True):
        if kind[1:] != kinds[0][1:]:
            raise DataError(
                f"clients of different targets: those of {name} have the shape {kind[2]}, those of "
                f"{sources.names[0]} {kinds[0][2]}"
            )
    if len(parts) == 1:
        return parts[0]
    columns = [list(leaves(x)) for x, _ in parts]
    joined = iter([torch.cat([column[place] for column in columns]) for place in range(len(columns[0]))])
    return mapped(lambda leaf: next(joined), parts[0][0]), torch.cat([y for _, y in parts])


def _rows_of(dataset: Any) -> tuple[Any, Tensor] | None:
    """The rows of a dataset that is nothing but tensors."""
    if type(dataset) is Rows:
        return dataset.x, dataset.y
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        inputs, targets = dataset.tensors
        return inputs.detach(), targets.detach() if targets.is_floating_point() else targets.long()
    if (
        type(dataset) is Subset
        and type(dataset.dataset) in (Rows, TensorDataset)
        and (rows := _rows_of(dataset.dataset)) is not None
    ):
        chosen = torch.as_tensor(list(dataset.indices), dtype=torch.long)
        return mapped(lambda leaf: leaf[chosen], rows[0]), rows[1][chosen]
    return None


def _read_all(dataset: Any, name: str) -> tuple[Any, Tensor]:
    """Every sample of a dataset, one after the other."""
    with seeded(0):
        first = _pair_of(sample_of(dataset, 0, name), name, 0)
        columns = [torch.empty((len(dataset), *leaf.shape), dtype=leaf.dtype) for leaf in leaves(first)]
        for start in range(0, len(dataset), BLOCK):
            samples = [sample_of(dataset, index, name) for index in range(start, min(start + BLOCK, len(dataset)))]
            if not _put_block(samples, columns, start):
                for index, sample in enumerate(samples, start):
                    _put(sample, columns, first, name, index)
    rows = iter(columns)
    inputs, targets = mapped(lambda leaf: next(rows), tuple(first))
    return inputs, targets


def _put_block(samples: Sequence[Any], columns: Sequence[Tensor], start: int) -> bool:
    """Many samples at once, if all are a tensor like the first one and a whole number: a fifth of the time."""
    if len(columns) != 2 or not all(type(sample) is tuple and len(sample) == 2 for sample in samples):
        return False
    inputs, targets = zip(*samples, strict=True)
    alike = all(type(x) is Tensor and x.dtype is columns[0].dtype and x.shape == columns[0].shape[1:] for x in inputs)
    if (
        not alike
        or not all(type(y) is int for y in targets)
        or columns[1].dtype is not torch.long
        or columns[1].dim() != 1
    ):
        return False
    torch.stack([x.detach() for x in inputs], out=columns[0][start : start + len(samples)])
    columns[1][start : start + len(samples)] = torch.tensor(targets)
    return True


def _put(sample: Any, columns: Sequence[Tensor], first: tuple[Any, Tensor], name: str, index: int) -> None:
    """One sample, which must be like the first."""
    pair = _pair_of(sample, name, index)
    found = list(leaves(pair))
    if [leaf.shape for leaf in found] != [column.shape[1:] for column in columns]:
        raise DataError(
            f"{name}: sample {index} is {layout(pair)}, sample 0 {layout(first)}; make them alike, or give a "
            "collate_fn that does"
        )
    for column, leaf in zip(columns, found, strict=True):
        if column.dtype is not leaf.dtype and torch.promote_types(column.dtype, leaf.dtype) is not column.dtype:
            raise DataError(
                f"{name}: sample {index} is {layout(pair)}, sample 0 {layout(first)}; make them of one type"
            )
        column[index] = leaf


def _pair_of(sample: Any, name: str, index: int) -> tuple[Any, Tensor]:
    if not _is_pair(sample):
        raise DataError(f"{name}: sample {index} is {shown(sample)}, not (inputs, target) of numbers as sample 0")
    return mapped(_as_tensor, sample[0]), _target(sample[1], name, index)


def _as_tensor(leaf: Any) -> Tensor:
    return (
        leaf.detach()
        if isinstance(leaf, Tensor)
        else torch.tensor(leaf, dtype=torch.float64)
        if isinstance(leaf, float)
        else torch.as_tensor(leaf)
    )


def _target(value: Any, name: str, index: int) -> Tensor:
    """A target as a tensor: whole numbers as torch's losses take them."""
    if not _is_number(value):
        raise DataError(f"{name}: sample {index} has the label {shown(value)}, which is no number")
    found = _as_tensor(value)
    return found if found.is_floating_point() else found.long()


# -- random transforms ------------------------------------------------------------------------------------------------


def _changing(sources: Sources) -> list[bool]:
    """Of each dataset, whether a sample read again is another: it has random transforms. What no seed repeats is
    refused."""
    changes = []
    each = max(1, PROBED // len(sources.datasets))
    for dataset, name, length in zip(sources.datasets, sources.names, sources.lengths, strict=True):
        if _rows_of(dataset) is not None:
            changes.append(False)
            continue
        changing = has_random_transform(dataset)
        for index in np.unique(np.linspace(0, length - 1, min(each, length)).astype(int)).tolist():
            first, second, again = (_read_digest(dataset, index, name, seed) for seed in (1, 2, 1))
            if first != again:
                raise DataError(
                    f"{name}: sample {index} is another each time it is read, whatever the seed; random "
                    "transforms must draw from the generators "
                    "of torch, numpy or random themselves, so that a run can be repeated"
                )
            changing = changing or first != second
        changes.append(changing)
    return changes


def _read_digest(dataset: Any, index: int, name: str, seed: int) -> str:
    with seeded(seed):
        return digest(sample_of(dataset, index, name))


def _unaugment(sources: Sources, changes: Sequence[bool], shared: Sequence[bool]) -> tuple[str, ...]:
    """Let evaluation read datasets without their random transforms; says so where that cannot be."""
    left = 0
    for number, (dataset, name) in enumerate(zip(sources.datasets, sources.names, strict=True)):
        if not changes[number]:
            continue
        plain = without_random(dataset)
        if plain is not None and _repeats(dataset, plain, name):
            sources.unaugmented[number] = plain
        else:
            left += shared[number]
    if not left:
        return ()
    return (
        f"evaluation reads samples with the random transforms of {left} of {len(changes)} Datasets, the same "
        "every time; "
        "give (train, val, test), or persafl_lit.Augmented(dataset, transform), to evaluate them as they are",
    )


def _repeats(dataset: Any, plain: Any, name: str) -> bool:
    """Whether samples without random transforms are as large as with them, and do not change."""
    try:
        return layout(sample_of(plain, 0, name)) == layout(sample_of(dataset, 0, name)) and not any(
            _read_digest(plain, index, name, 1) != _read_digest(plain, index, name, 2)
            for index in range(min(8, len(plain)))
        )
    except DataError:
        return False


# -- labels -----------------------------------------------------------------------------------------------------------


def _labels(sources: Sources, firsts: Sequence[Any]) -> Tensor | None:
    """The targets of all samples that are read by index: as the Datasets' `targets` have them, else read once; None if
    they have no one shape."""
    found: list[Tensor] = []
    if not all(
        isinstance(first, (tuple, list)) and len(first) == 2 and not isinstance(first[1], (Mapping, tuple, list))
        for first in firsts
    ):
        return None
    for dataset, name, length in zip(sources.datasets, sources.names, sources.lengths, strict=True):
        known = _known_targets(dataset, name)
        if known is None:
            with seeded(0):
                targets = [_target(sample_of(dataset, index, name)[1], name, index) for index in range(length)]
            if len({target.shape for target in targets}) > 1:
                return None
            known = torch.stack(targets)
        found.append(known)
    alike = len({(labels.shape[1:], labels.is_floating_point()) for labels in found}) == 1
    return torch.cat(found) if alike else None


def _known_targets(dataset: Any, name: str) -> Tensor | None:
    """A dataset's list of targets, if what it says of some samples is so."""
    values: Any
    if type(dataset) is Rows:
        return dataset.y
    if isinstance(dataset, Augmented):
        return _known_targets(dataset.dataset, name)
    if type(dataset) is Subset:
        inner = _known_targets(dataset.dataset, name)
        return None if inner is None else inner[torch.as_tensor(list(dataset.indices), dtype=torch.long)]
    values = getattr(dataset, "targets", None)
    values = getattr(dataset, "labels", None) if values is None else values
    try:
        known = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
        if known.dim() != 1 or len(known) != len(dataset):
            return None
    except (TypeError, ValueError, RuntimeError):
        return None
    known = known if known.is_floating_point() else known.long()
    with seeded(0):
        checked = np.unique(np.linspace(0, len(known) - 1, min(8, len(known))).astype(int)).tolist()
        targets = [_target(sample_of(dataset, index, name)[1], name, index) for index in checked]
    return (
        known
        if all(target.dim() == 0 and target == known[index] for target, index in zip(targets, checked, strict=True))
        else None
    )


def _check_labels(labels: Tensor | None, classes: int | None, sources: Sources) -> None:
    if labels is None or labels.is_floating_point():
        if labels is not None and not torch.isfinite(labels).all():
            raise DataError(f"{_where(~torch.isfinite(labels), sources)} has a target that is not finite")
        return
    wrong = (labels < 0) & ((labels != IGNORED) | (labels.dim() == 1))
    if classes is not None:
        wrong |= labels >= classes
    if wrong.any():
        value = int(labels[wrong][0])
        allowed = (
            f"data.classes={classes} allows 0 to {classes - 1}"
            if classes is not None
            else "labels are whole numbers from 0 on"
        )
        raise DataError(f"{_where(wrong, sources)} has the label {value}; {allowed}")


def _where(wrong: Tensor, sources: Sources) -> str:
    index = int(wrong.flatten(1).any(1).nonzero()[0, 0]) if wrong.dim() > 1 else int(wrong.nonzero()[0, 0])
    source, local = sources.place_of(index)
    return f"{sources.names[source]}: sample {local}"


def _classes(labels: Tensor | None, classes: int | None) -> int:
    if classes is not None or labels is None:
        return classes or 0
    if labels.is_floating_point():
        return math.prod(labels.shape[1:])
    found = int(labels.max()) + 1
    if found > max(MANY_CLASSES, labels.numel()):
        raise DataError(
            f"the labels go up to {found - 1}, which makes {found:,} classes for {labels.numel():,} of them; "
            "number the classes from 0 on, or set data.classes"
        )
    return found


def _task(first: Any, labels: Tensor | None) -> Task:
    if labels is None:
        if not (isinstance(first, (tuple, list)) and len(first) == 2 and _is_number(first[1])):
            return "classification"
        labels = _target(first[1], "", 0)[None]
    return "regression" if labels.is_floating_point() else "tokens" if labels.dim() > 1 else "classification"


def _shape(first: Any) -> tuple[int, ...]:
    inputs = first[0] if isinstance(first, (tuple, list)) and len(first) == 2 else None
    return tuple(inputs.shape) if isinstance(inputs, (Tensor, np.ndarray)) else ()


def _sampled_digest(sources: Sources, labels: Tensor | None) -> str:
    """Of data that is read by index: lengths, labels, and the bytes of up to HASHED samples spread over the
    datasets."""
    seen = hashlib.sha256(repr(sources.lengths).encode())
    if labels is not None:
        add_to(seen, labels)
    each = max(2, HASHED // len(sources.datasets))
    for dataset, name, length in zip(sources.datasets, sources.names, sources.lengths, strict=True):
        for index in np.unique(np.linspace(0, length - 1, min(each, length)).astype(int)).tolist():
            with seeded(0):
                add_to(seen, sample_of(dataset, index, name))
    return seen.hexdigest()


# -- who holds what ---------------------------------------------------------------------------------------------------


def _parts(
    holdings: Holdings, sources: Sources, labels: Tensor | None, settings: Given, clients: int | None, seed: int
) -> tuple[list[Pieces], tuple[str, ...]]:
    """Each client's train, val and test samples, and what should be said about it."""
    is_class = labels is not None and labels.dim() == 1 and not labels.is_floating_point()
    strata = labels.numpy() if is_class and labels is not None else np.zeros(len(sources), dtype=np.int64)
    if holdings.clients is not None:
        spans = [
            {part: np.arange(*sources.offsets[[k, k + 1]]) for part, k in splits.items()} for splits in holdings.clients
        ]
        kept, notes = _taken(len(spans), clients, seed)
        found = [_pieces(client, spans[number], strata, settings, seed) for client, number in enumerate(kept)]
        return found, notes
    if holdings.client_of is not None:
        names, numbers = np.unique(holdings.client_of, return_inverse=True)
        kept, notes = _taken(len(names), clients, seed)
        held = [np.flatnonzero(numbers == number) for number in kept]
    else:
        if not is_class and settings.partition not in ("iid", NATURAL):
            raise ConfigError(
                f"data.partition={settings.partition} deals samples by their class, and these have none; use "
                "data.partition=iid"
            )
        held, notes = settings.deal(strata, 30 if clients is None else clients, seed), ()
        left = len(sources) - sum(map(len, held))
        if left:
            notes = (f"{left} of {len(sources)} samples belong to classes that no client holds",)
    return [
        _pieces(client, _by_split(part, holdings.split_of), strata, settings, seed) for client, part in enumerate(held)
    ], notes


def _by_split(part: np.ndarray, split_of: np.ndarray | None) -> dict[Split, np.ndarray]:
    """A client's samples by the split that the data has them in; a split that the data has for nobody is missing."""
    if split_of is None:
        return {"train": part}
    present = set(split_of.tolist())
    return {
        name: part[split_of[part] == number]
        for number, name in enumerate(SPLITS)
        if number in present or name == "train"
    }


def _taken(there: int, asked: int | None, seed: int) -> tuple[list[int], tuple[str, ...]]:
    """Which of the data's own clients take part."""
    if asked is None or asked == there:
        return list(range(there)), ()
    if asked > there:
        raise ConfigError(f"clients={asked}, but the data has {there} clients; lower clients, or leave it out")
    kept = sorted(rng(seed, "clients that take part").permutation(there)[:asked].tolist())
    return kept, (f"{asked} of the data's {there} clients take part, drawn by the seed",)


def _pieces(client: int, given: Mapping[Split, np.ndarray], strata: np.ndarray, settings: Given, seed: int) -> Pieces:
    """Train, val and test of one client; what the data lacks is set aside from its training samples, by the config's
    shares."""
    train = given["train"]
    if len(given) == 1:
        if len(train) < SMALLEST:
            raise DataError(
                f"client {client} has {_samples(len(train))}, fewer than the {SMALLEST} that train, val and test need"
            )
        return split(train, strata, settings, client, seed)
    found = dict(given)
    for name, share in (("val", settings.val_share), ("test", settings.test_share)):
        if name not in found:
            if len(found["train"]) < 2:
                raise DataError(
                    f"client {client} has {_samples(len(found['train']))} to train with, too few to set one "
                    f"aside for {name}"
                )
            found[name], found["train"] = set_aside(found["train"], strata, share, client, seed)  # type: ignore[index]
    for name, piece in found.items():
        if not len(piece):
            raise DataError(f"client {client} has no samples for {name}")
    return found["train"], found["val"], found["test"]


def _samples(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}" if count else "no samples"
