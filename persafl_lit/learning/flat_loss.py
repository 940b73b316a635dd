"""A backbone's loss as a function of one flat vector: f(w; D), its gradient and its Hessian-vector product."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from persafl_lit.data.federation import Batch
from persafl_lit.errors import ConfigError
from persafl_lit.learning.kernels import backprop
from persafl_lit.learning.running_statistics import Statistics


class FlatLoss:
    """f(w; D) of `backbone`, whose trainable parameters become views of one vector, `point`.

    Their gradients are gathered in a second vector, so that a step is one vector operation. Weights of
    2-d convolutions lie in channels_last order, which is faster on CPUs (and rounds otherwise than the usual order).
    The order of `point` is [shared, private], each in the order of `backbone.parameters()`; it is part of the
    checkpoint format. If f is the cross-entropy of plain `layers` and nothing else, derivatives go through these by
    hand; else autograd finds them.

    `statistics` are the buffers that training changes, by default all there are. The next evaluation after
    `keep_statistics = True` changes them; every other one restores them, so f(.; D) is a function of w. A network that
    has some (BatchNorm's) computes in the usual order of images and weights: it is mostly deep, and channels_last is
    slower where many layers see few pixels.
    """

    keep_statistics = False

    def __init__(
        self,
        backbone: nn.Module,
        smoothness: float | None = None,
        layers: Sequence[nn.Module] = (),
        private: Collection[str] = (),
        statistics: Collection[str] | None = None,
    ) -> None:
        self.backbone = backbone
        self.smoothness = smoothness
        self._layers = layers
        self.evaluations = 0
        self.losses: list[Tensor] = []
        trainable = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
        self._parameters = list(trainable.values())
        if not self._parameters:
            raise ConfigError(f"the model {type(backbone).__name__} has no trainable parameters")
        changing = [name for name, _ in backbone.named_buffers()] if statistics is None else statistics
        self._channels_last = not changing
        first = self._parameters[0]
        starts, size = {}, 0
        for name in sorted(trainable, key=lambda name: name in private):
            starts[name] = size
            size += trainable[name].numel()
        self._starts = [starts[name] for name in trainable]
        self.shared = size - sum(trainable[name].numel() for name in private)
        """How many values of `point` are shared: the first ones."""
        self.point = torch.empty(size, dtype=first.dtype, device=first.device)
        self._gradient = torch.zeros_like(self.point)
        self._one = torch.ones((), dtype=first.dtype, device=first.device)
        self._gradients = list(self._views(self._gradient))
        for parameter, value in zip(self._parameters, self._views(self.point), strict=True):
            value.copy_(parameter.detach())
            parameter.data = value
        self.statistics = Statistics(backbone, changing) if changing else None

    def _views(self, vector: Tensor) -> Iterator[Tensor]:
        """A vector's part for each parameter, in the backbone's order."""
        for parameter, start in zip(self._parameters, self._starts, strict=True):
            flat = vector[start : start + parameter.numel()]
            if parameter.dim() == 4 and self._channels_last:
                out, inside, height, width = parameter.shape
                yield flat.view(out, height, width, inside).permute(0, 3, 1, 2)
            else:
                yield flat.view(parameter.shape)

    def load(self, w: Tensor) -> Tensor:
        """Copy w into the live parameters; returns them."""
        if w is not self.point:
            self.point.copy_(w)
        # mixed precision keeps rounded weights, and would not notice that they have changed
        torch.clear_autocast_cache()
        return self.point

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """grad f(w; D), in a buffer that the next evaluation overwrites."""
        self.load(w)
        self._seed(batch.mask)
        with self._pass():
            self.losses.append(self._by_hand(batch) if self._plain else self._by_autograd(batch))
        self.evaluations += 1
        return self._gradient

    def hessian_vector(self, w: Tensor, u: Tensor, batch: Batch) -> Tensor:
        """H(w; D) u; counts as two evaluations."""
        self.load(w)
        self._seed(batch.mask)
        self.evaluations += 2
        product = torch.empty_like(u)
        slopes = list(self._views(product))
        if self._plain:
            inputs, labels = batch.data
            backprop.hessian_vector(self._layers, inputs, labels, self._views(u), slopes)
        else:
            with self._pass():
                torch._foreach_copy_(slopes, self._double_backward(u, batch))
        return product

    def ordered(self, data: Any) -> Any:
        """A batch's data with images in the order that the weights have; a federation's are channels_last."""
        return (
            data
            if self._channels_last
            else tree_map(lambda one: one.contiguous() if isinstance(one, Tensor) else one, data)
        )

    def set_gradients(self, gradient: Tensor) -> None:
        """Let every parameter's `grad` be its part of this vector."""
        if gradient is not self._gradient:
            self._gradient.copy_(gradient)
        for parameter, part in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = part

    def update_statistics(self, w: Tensor, batch: Batch) -> None:
        """A forward pass in training, for what it does to the statistics."""
        self.load(w)
        self._seed(batch.mask)
        with torch.no_grad():
            step_loss(self.backbone, self.ordered(batch.data))

    def _pass(self) -> AbstractContextManager[None]:
        """The context of an evaluation: outside the first one of a local step, statistics stay as they are."""
        keep, self.keep_statistics = self.keep_statistics, False
        return nullcontext() if keep or self.statistics is None else self.statistics.unchanged()

    @property
    def _plain(self) -> bool:
        return bool(self._layers) and not torch.is_autocast_enabled(self.point.device.type)

    def _by_hand(self, batch: Batch) -> Tensor:
        """f(w; D) of plain layers; its gradient goes into the buffer."""
        inputs, labels = batch.data
        return backprop.gradient(self._layers, inputs, labels, self._gradients)

    def _by_autograd(self, batch: Batch) -> Tensor:
        """f(w; D) of any backbone; its gradient goes into the buffer."""
        loss = step_loss(self.backbone, self.ordered(batch.data))
        # With the seed of the backward pass at hand and unused parameters looked after here, a tiny model gains a
        # tenth.
        usual = loss.dim() == 0 and loss.dtype is self._one.dtype
        slopes = torch.autograd.grad(loss, self._parameters, self._one if usual else None, allow_unused=True)
        if any(slope is None for slope in slopes):
            slopes = tuple(
                torch.zeros_like(p) if slope is None else slope
                for p, slope in zip(self._parameters, slopes, strict=True)
            )
        torch._foreach_copy_(self._gradients, slopes)
        return loss.detach()

    def _double_backward(self, u: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """grad_w <grad f(w; D), u>, for any backbone."""
        slopes = torch.autograd.grad(
            step_loss(self.backbone, self.ordered(batch.data)),
            self._parameters,
            create_graph=True,
            materialize_grads=True,
        )
        along_u = sum((slope * part).sum() for slope, part in zip(slopes, self._views(u), strict=True))
        if not (isinstance(along_u, Tensor) and along_u.requires_grad):
            return tuple(torch.zeros_like(p) for p in self._parameters)
        return torch.autograd.grad(along_u, self._parameters, materialize_grads=True)

    def _seed(self, mask: int) -> None:
        # Not torch.manual_seed: without a GPU it records a traceback for each one that might yet appear.
        torch.default_generator.manual_seed(mask)
        if self.point.device.type != "cpu":
            torch.get_device_module(self.point.device).manual_seed(mask)


def step_loss(backbone: nn.Module, data: Any) -> Tensor:
    """What the backbone's `training_step` returns: a loss, or a dict that holds it."""
    output = backbone.training_step(data, 0)  # type: ignore[operator]
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise ConfigError(f"{type(backbone).__name__}.training_step must return a loss; got {type(loss).__name__}")
    return loss


def changing_buffers(backbone: nn.Module, batch: Batch) -> list[str]:
    """The buffers that a training step changes; it is tried on a copy."""
    trial = copy.deepcopy(backbone).train()
    before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in trial.named_buffers()}
    step_loss(trial, batch.data)
    after = dict(trial.named_buffers())

    def same(name: str, buffer: Tensor, version: int, value: Tensor) -> bool:
        # BatchNorm's kernels change values without counting a version.
        return after.get(name) is buffer and buffer._version == version and torch.equal(buffer, value)

    return [name for name, about in before.items() if not same(name, *about)]
