"""What executors send to workers, and what comes back.

A message is one of `Train`, `Evaluate` and `CostGradient`; its result depends on nothing but the message, so it may be
computed anywhere, in any order, or twice. Tensors are named: `read` is what the server sends (the shared model `w`, and
what a rule adds), `memory` what the client kept from its last visit, `sent` what it sends to the server (`delta`, and
what an objective adds). `separate` and `join` are the one definition of how they travel, through shared memory and
through Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from persafl_lit.common.tensors import NO_VISIT, Tensors

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Train:
    """A client's visit: Algorithm 2 from download to upload."""

    client: int
    visit: int
    read: Tensors
    memory: Tensors = field(default_factory=dict)
    after: int = NO_VISIT
    """The visit that left this memory."""


@dataclass(frozen=True)
class Evaluate:
    """Fine-tune, then evaluate one client."""

    client: int
    rules: tuple[str, ...]
    """Fine-tuning rules by name; the first is the one that all methods are compared by."""
    read: Tensors
    memory: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class CostGradient:
    """grad F_i: the gradient of one client's own cost over all its training data."""

    client: int
    read: Tensors
    memory: Tensors = field(default_factory=dict)


Message = Train | Evaluate | CostGradient


@dataclass(frozen=True)
class Update:
    """The result of `Train`: what the client sends, what it keeps, and what the visit took."""

    sent: Tensors
    """`delta` = w_0 - w_Q of the shared part, and what the objective adds."""
    memory: Tensors
    loss: float
    """Mean over the local steps, each where it began."""
    evaluations: int
    """Gradients computed."""
    residual: float | None = None
    """How far an inner minimisation was from its end, where there is one."""


@dataclass(frozen=True)
class Gradient:
    """The result of `CostGradient`: `gradient`, of the shared part. (That of `Evaluate` is a `Scores`.)"""

    sent: Tensors


PAYLOADS = ("read", "sent", "memory")
"""Fields of named tensors."""


def separate(record: T) -> tuple[T, list[Tensor]]:
    """The record with names instead of tensors, and the tensors in the order of these names."""
    names: dict[str, Any] = {}
    tensors: list[Tensor] = []
    for payload in PAYLOADS:
        if (found := getattr(record, payload, None)) is not None:
            names[payload] = tuple(found)
            tensors += found.values()
    return (_with(record, names), tensors) if names else (record, tensors)


def join(record: T, tensors: Sequence[Tensor]) -> T:
    """Undo `separate`."""
    left = iter(tensors)
    payloads = {
        name: {key: next(left) for key in keys}
        for name in PAYLOADS
        if (keys := getattr(record, name, None)) is not None
    }
    return _with(record, payloads) if payloads else record


def _with(record: T, fields: dict[str, Any]) -> T:
    """What `dataclasses.replace` does, in a tenth of its time: every update passes here four times."""
    other = object.__new__(type(record))
    vars(other).update(vars(record), **fields)
    return other
