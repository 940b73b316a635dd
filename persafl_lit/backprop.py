"""Gradients and Hessian-vector products of networks of plain layers, without autograd's record of every operation.

The gradient is ordinary backpropagation, with each slope written where it is wanted. H u comes by Pearlmutter's R-operator
(Neural Computation 6, 1994): R{x} is the derivative of x when the weights move along u, so R{w} = u and R{grad f(w)} = H u. The
forward pass then carries x and R{x}, the backward pass g = df/dx and R{g}. Double backward finds the same, but also slopes
that nobody asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persafl_lit.dropout import Dropout

aten = torch.ops.aten


class Pass(ABC):
    """One layer, on the way there and back."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """y, and what the way back needs."""

    @abstractmethod
    def backward(self, g: Tensor, slopes: list[Tensor]) -> Tensor:
        """df/dx from df/dy. A layer with weights takes its slopes from the end of the list, and fills them."""

    @abstractmethod
    def forward_r(self, Rx: Tensor | None, u: Iterator[Tensor]) -> Tensor | None:
        """R{y} once `forward` is done; R{x} is None, which is zero, up to the first weights, which take their share of u."""

    @abstractmethod
    def backward_r(self, g: Tensor, Rg: Tensor, slopes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """df/dx and its R; the slopes are those of H u."""


class Weighted(Pass):
    """y = W x + b, with W and b moving along U and v; the product of W and x is what kinds of layers differ in."""

    innermost = False
    """Whether nobody needs df/dx: no layer before this one has weights."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.W, self.b = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.product(x, self.W, self.b)

    def forward_r(self, Rx: Tensor | None, u: Iterator[Tensor]) -> Tensor:
        self.Rx, self.U = Rx, next(u)
        Ry = self.product(self.x, self.U, None if self.b is None else next(u))
        return Ry if Rx is None else Ry.add_(self.product(Rx, self.W, None))

    def backward_r(self, g: Tensor, Rg: Tensor, slopes: list[Tensor]) -> tuple[Tensor, Tensor]:
        slope = slopes[-1 if self.b is None else -2]
        Rg_in = self.backward(Rg, slopes)
        return (g, Rg) if self.Rx is None else self.crossed(g, self.Rx, slope, Rg_in)

    @abstractmethod
    def product(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        """W x + b."""

    @abstractmethod
    def crossed(self, g: Tensor, Rx: Tensor, slope: Tensor, Rg_in: Tensor) -> tuple[Tensor, Tensor]:
        """df/dx and its R; to the slope of W and to R{g} is added what comes of R{x} and of U."""


class Dense(Weighted):
    """Matrix products."""

    def product(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, W, b)

    def backward(self, g: Tensor, slopes: list[Tensor]) -> Tensor:
        if self.b is not None:
            torch.sum(g, 0, out=slopes.pop())
        torch.mm(g.t(), self.x, out=slopes.pop())
        return g if self.innermost else g @ self.W

    def crossed(self, g: Tensor, Rx: Tensor, slope: Tensor, Rg_in: Tensor) -> tuple[Tensor, Tensor]:
        slope.addmm_(g.t(), Rx)
        return g @ self.W, Rg_in.addmm_(g, self.U)


class Convolution(Weighted):
    """Convolutions."""

    def product(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        layer = self.layer
        return F.conv2d(x, W, b, layer.stride, layer.padding, layer.dilation, layer.groups)

    def backward(self, g: Tensor, slopes: list[Tensor]) -> Tensor:
        g_in, slope, bias_slope = self._transposed(g, self.x, self.W, not self.innermost, True, self.b is not None)
        if self.b is not None:
            slopes.pop().copy_(bias_slope)
        slopes.pop().copy_(slope)
        return g if self.innermost else g_in

    def crossed(self, g: Tensor, Rx: Tensor, slope: Tensor, Rg_in: Tensor) -> tuple[Tensor, Tensor]:
        along_U, along_Rx, _ = self._transposed(g, Rx, self.U, True, True, False)
        slope.add_(along_Rx)
        return self._transposed(g, self.x, self.W, True, False, False)[0], Rg_in.add_(along_U)

    def _transposed(self, g: Tensor, x: Tensor, W: Tensor, *wanted: bool) -> Sequence[Tensor]:
        """The slopes along x, W and b of <g, W x + b>."""
        layer, biases = self.layer, [len(W)]
        geometry = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)
        found: Sequence[Tensor] = aten.convolution_backward.default(g, x, W, biases, *geometry, wanted)
        return found


class Unweighted(Pass):
    """No weights, and linear wherever it is differentiable: R{x} passes like x, and R{g} like g."""

    def backward(self, g: Tensor, slopes: list[Tensor]) -> Tensor:
        return self.back(g)

    def forward_r(self, Rx: Tensor | None, u: Iterator[Tensor]) -> Tensor | None:
        return None if Rx is None else self.along(Rx)

    def backward_r(self, g: Tensor, Rg: Tensor, slopes: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.back(g), self.back(Rg)

    @abstractmethod
    def along(self, Rx: Tensor) -> Tensor:
        """The linear part."""

    @abstractmethod
    def back(self, g: Tensor) -> Tensor:
        """The transpose of that."""


class Relu(Unweighted):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        self.y = x.relu()
        return self.y

    def along(self, Rx: Tensor) -> Tensor:
        passed: Tensor = aten.threshold_backward.default(Rx, self.y, 0)
        return passed

    def back(self, g: Tensor) -> Tensor:
        return self.along(g)


class Pool(Unweighted):
    """The greatest pixel of each window."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        self.x = x
        y, self.greatest = F.max_pool2d_with_indices(x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
        return y

    def along(self, Rx: Tensor) -> Tensor:
        pixels, greatest = (t.permute(0, 2, 3, 1) for t in (Rx, self.greatest))  # channels_last: flattened without a copy
        return pixels.flatten(1, 2).gather(1, greatest.flatten(1, 2)).view(greatest.shape).permute(0, 3, 1, 2)

    def back(self, g: Tensor) -> Tensor:
        layer = self.layer
        window = (_pair(value) for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation))
        spread: Tensor = aten.max_pool2d_with_indices_backward.default(g, self.x, *window, layer.ceil_mode, self.greatest)
        return spread


class Masked(Unweighted):
    """Dropout: x times the mask that the layer would draw now."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        self.mask = layer.mask(x) if layer.training and layer.p else None
        return self.along(x)

    def along(self, Rx: Tensor) -> Tensor:
        return Rx if self.mask is None else Rx * self.mask

    def back(self, g: Tensor) -> Tensor:
        return self.along(g)


class Flat(Unweighted):
    """Images as vectors."""

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.order = x.shape, torch.contiguous_format if x.is_contiguous() else torch.channels_last
        return self.along(x)

    def along(self, Rx: Tensor) -> Tensor:
        return Rx.flatten(1)

    def back(self, g: Tensor) -> Tensor:
        return g.view(self.shape).contiguous(memory_format=self.order)


PASSES: dict[type[nn.Module], type[Pass]] = {
    nn.Conv2d: Convolution,
    nn.MaxPool2d: Pool,
    nn.ReLU: Relu,
    Dropout: Masked,
    nn.Flatten: Flat,
    nn.Linear: Dense,
}


def plain_layers(network: nn.Module) -> Sequence[nn.Module]:
    """The layers of a network that is a sequence of those above and nothing else, for images up to its Flatten and for vectors
    after it, each with weights of its own; of any other, none."""
    layers = tuple(network) if type(network) is nn.Sequential and untouched(network) else ()
    kinds = [type(layer) for layer in layers]
    if kinds.count(nn.Flatten) != 1 or not all(map(_is_plain, layers)):
        return ()
    flat = kinds.index(nn.Flatten)
    weights = [weight for layer in layers if isinstance(layer, nn.Linear | nn.Conv2d) for weight in (layer.weight, layer.bias) if weight is not None]
    own = [*map(id, weights)] == [*map(id, network.parameters())]  # which names one that is shared only once
    return layers if own and nn.Linear not in kinds[:flat] and {*kinds[flat + 1 :]} <= {nn.Linear, nn.ReLU, Dropout} else ()


def untouched(module: nn.Module) -> bool:
    """Whether it does what its class says: no hooks, no methods of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    slope_hooks = [parameter._backward_hooks for parameter in module.parameters()]
    return not any([*hooks, *slope_hooks]) and not {"forward", "training_step", "score_loss"} & vars(module).keys()


def _is_plain(layer: nn.Module) -> bool:
    frozen = not all(parameter.requires_grad for parameter in layer.parameters())
    other_padding = isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str))
    gives_indices = isinstance(layer, nn.MaxPool2d) and layer.return_indices
    flattens_less = isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1)
    return type(layer) in PASSES and untouched(layer) and not (frozen or other_padding or gives_indices or flattens_less)


@torch.no_grad()
def gradient(layers: Sequence[nn.Module], inputs: Tensor, labels: Tensor, slopes: list[Tensor]) -> Tensor:
    """The mean cross-entropy; its slopes are written into `slopes`, one for each parameter of plain layers, in their order.

    With the first weights' slopes the way back ends: nobody needs df/dx of the inputs."""
    passes, remaining, x = _passes(layers), [*slopes], inputs
    for one in passes:
        x = one.forward(x)
    loss, g, _ = _cross_entropy(x, labels)
    while remaining:
        g = passes.pop().backward(g, remaining)
    return loss


@torch.no_grad()
def hessian_vector(layers: Sequence[nn.Module], inputs: Tensor, labels: Tensor, u: Iterable[Tensor], slopes: list[Tensor]) -> None:
    """H u of the mean cross-entropy, written likewise; u has these shapes too."""
    passes, remaining, shares = _passes(layers), [*slopes], iter(u)
    x, Rx = inputs, None
    for one in passes:
        x = one.forward(x)
        Rx = one.forward_r(Rx, shares)
    assert Rx is not None
    _, g, log_p = _cross_entropy(x, labels)
    p = log_p.exp()
    pR = p * Rx
    Rg = (pR - p * pR.sum(1, keepdim=True)) / len(p)
    while remaining:
        g, Rg = passes.pop().backward_r(g, Rg, remaining)


def _passes(layers: Sequence[nn.Module]) -> list[Pass]:
    passes = [PASSES[type(layer)](layer) for layer in layers]
    next(one for one in passes if isinstance(one, Weighted)).innermost = True
    return passes


def _cross_entropy(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its slope (p - y) / n along the scores, and log p with p = softmax(scores): the calls that autograd makes."""
    log_p = scores.log_softmax(1)
    weight, mean, ignored = None, 1, -100  # of F.nll_loss: as by default
    loss, n = aten.nll_loss_forward.default(log_p, labels, weight, mean, ignored)
    slope = aten.nll_loss_backward.default(torch.ones_like(loss), log_p, labels, weight, mean, ignored, n)
    return loss, aten._log_softmax_backward_data.default(slope, log_p, 1, log_p.dtype), log_p


def _pair(value: int | Sequence[int]) -> Sequence[int]:
    return (value, value) if isinstance(value, int) else tuple(value)
