"""Buffers that training changes, such as BatchNorm's running mean and variance, as one vector."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from persafl_lit.errors import ModelError


class Statistics:
    """The buffers `names` of a backbone, which a forward pass in training changes.

    They are kept and sent as one vector of at least float32. Whole numbers (BatchNorm's `num_batches_tracked`) are
    rounded when they are loaded.
    """

    def __init__(self, backbone: nn.Module, names: Collection[str]) -> None:
        self._backbone = backbone
        self._places = [_place(backbone, name) for name in names]
        self._own = [owner[name] for owner, name in self._places]
        self._sizes = [tensor.numel() for tensor in self._own]
        double = any(tensor.dtype is torch.float64 for tensor in self._own)
        self._dtype = torch.float64 if double else torch.float32
        self.start = self.vector()
        """Their first values."""

    def vector(self) -> Tensor:
        """A copy of their values."""
        return torch.cat([owner[name].detach().to(self._dtype).flatten() for owner, name in self._places])

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        """Give them these values. A module that puts other tensors in their places gets the first ones back."""
        for (owner, name), tensor, part in zip(self._places, self._own, vector.split(self._sizes), strict=True):
            owner[name] = tensor
            tensor.copy_((part if tensor.is_floating_point() else part.round()).view(tensor.shape))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Whatever happens to them meanwhile is undone."""
        tensors = [owner[name] for owner, name in self._places]
        values = [tensor.detach().clone() for tensor in tensors]
        try:
            yield
        finally:
            for (owner, name), tensor in zip(self._places, tensors, strict=True):
                owner[name] = tensor
            with torch.no_grad():
                torch._foreach_copy_(tensors, values)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """From the first values, BatchNorm's become the plain mean over the batches that it sees."""
        self.load(self.start)
        layers = [
            layer
            for layer in self._backbone.modules()
            if isinstance(layer, _BatchNorm) and any(layer.running_mean is one for one in self._own)
        ]
        momenta = [layer.momentum for layer in layers]
        try:
            for layer in layers:
                layer.reset_running_stats()
                layer.momentum = None
            yield
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum  # type: ignore[assignment]


class ConstantBuffers:
    """The buffers that training does not change, such as positional tables: neither sent nor kept."""

    def __init__(self, backbone: nn.Module, statistics: Collection[str]) -> None:
        found = {name: tensor for name, tensor in backbone.named_buffers() if name not in statistics}
        self._seen = {name: (*_place(backbone, name), tensor, tensor._version) for name, tensor in found.items()}

    def check(self) -> None:
        """Refuse a model that changes them after all: results would depend on the order of jobs."""
        for name, (owner, key, tensor, version) in self._seen.items():
            if owner.get(key) is not tensor or tensor._version != version:
                raise ModelError(
                    f"the model changes its buffer {name!r}, which its first training step did not: change it "
                    "in every one, or never"
                )


def _place(backbone: nn.Module, name: str) -> tuple[dict[str, Tensor], str]:
    """The dict that holds a buffer, and its key there."""
    module, _, key = name.rpartition(".")
    return backbone.get_submodule(module)._buffers, key  # type: ignore[return-value]
