"""LEAF's JSON files (Caldas et al., 2018): users become clients."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from persafl_lit.common.input_files import plain_file
from persafl_lit.data.given import Given
from persafl_lit.errors import ConfigError, DataError, first_line, shown

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""Characters of LEAF's Shakespeare, in its order: a character's id is its place here."""
UserSamples = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Leaf(Given):
    """LEAF's ROOT/train/*.json and ROOT/test/*.json with `users` and `user_data`, as for FEMNIST. Validation samples
    are set aside from training."""

    root: str
    """Folder of train/ and test/, such as leaf/data/femnist/data."""
    shape: tuple[int, ...] = (1, 28, 28)
    """Of a sample, whose numbers are one list in the file; [] leaves them so. Text is a list of characters' ids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(side < 1 for side in self.shape):
            raise ConfigError(f"data.shape must be whole numbers >= 1; got {shown(list(self.shape))}")

    def load(self) -> Any:
        train, test = (self._users(name) for name in ("train", "test"))
        unknown = [user for user in test if user not in train]
        if unknown:
            raise DataError(
                f"user {shown(unknown[0])} is in test/ but not in train/; split by LEAF's preprocess.sh -t "
                "sample, so that all have both"
            )
        return [{"train": train[user], **({"test": test[user]} if user in test else {})} for user in train]

    def _users(self, name: str) -> dict[str, UserSamples]:
        folder = Path(self.root) / name
        try:
            files = sorted(folder.glob("*.json")) if folder.is_dir() else []
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot look into data.root={shown(self.root)}: {getattr(error, 'strerror', None) or error}"
            ) from None
        if not files and name == "train":
            raise DataError(
                f"data.root={shown(self.root)} has no files {name}/*.json; it needs LEAF's train/ and test/"
            )
        users: dict[str, UserSamples] = {}
        for file in files:
            for user, content in _content(file).items():
                if user in users:
                    raise DataError(f"{file}: user {shown(user)} is in another file, too")
                users[user] = self._samples(content, f"{file}: user {shown(user)}")
        return users

    def _samples(self, content: Any, where: str) -> UserSamples:
        if not (
            isinstance(content, dict) and isinstance(content.get("x"), list) and isinstance(content.get("y"), list)
        ):
            raise DataError(f"{where} has no lists x and y")
        if len(content["x"]) != len(content["y"]) or not content["x"]:
            raise DataError(
                f"{where} has {len(content['x'])} x and {len(content['y'])} y; it needs as many of each, one at least"
            )
        x, y = _numbers(content["x"], where, "x"), _numbers(content["y"], where, "y")
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]  # a character
        if x.dtype.kind == "f" and self.shape:
            if math.prod(x.shape[1:]) != math.prod(self.shape):
                raise DataError(
                    f"{where}: samples have {math.prod(x.shape[1:])} numbers, data.shape={list(self.shape)} "
                    f"has {math.prod(self.shape)}"
                )
            x = x.reshape(len(x), *self.shape)
        return x, y


def _content(file: Path) -> dict[str, Any]:
    """Of each user, what a file has."""
    try:
        content = json.loads(plain_file(file, DataError).read_bytes())
        users, data = content["users"], content["user_data"]
        return {str(user): data[user] for user in users}
    except DataError:
        raise
    except Exception as error:  # a damaged file can raise anything
        why = f"no {first_line(error)} in it" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"cannot read {file} as LEAF's JSON (users, num_samples, user_data): {why}") from None


def _numbers(values: list[Any], where: str, name: str) -> np.ndarray:
    """Whole numbers stay so (labels, ids); text becomes ids; x is otherwise of floats."""
    if isinstance(values[0], str):
        try:
            return np.array([[LETTERS.index(letter) for letter in text] for text in values], dtype=np.int64)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{where}: {name} is no text of LEAF's characters in lines of one length: {first_line(error)}"
            ) from None
    try:
        found = np.asarray(values)
        if found.dtype.kind not in "iuf":
            raise ValueError(f"an array of {found.dtype}")
    except ValueError as error:
        raise DataError(f"{where}: {name} must be numbers, as many for each sample: {first_line(error)}") from None
    if not np.isfinite(found).all():
        raise DataError(f"{where}: {name} holds values that are not finite")
    if name == "y":
        return found if found.dtype.kind == "f" and (found % 1).any() else found.astype(np.int64)
    return found.astype(np.float32)
