"""Hessian-vector products of networks of plain layers, by Pearlmutter's R-operator (Neural Computation 6, 1994).

R{x} is the derivative of x when the weights move along u: R{w} = u, so R{grad f(w)} = H u. One forward pass carries x and
R{x}, one backward pass g = df/dx and R{g}. Double backward finds the same, but also slopes that nobody asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

aten = torch.ops.aten


class Layer(ABC):
    """One layer of the network, on the way there and back."""

    slopes: Sequence[Tensor] = ()
    """Its share of H u, once `backward` is done."""

    def __init__(self, layer: Any, u: Sequence[Tensor]) -> None:
        self.layer = layer

    @abstractmethod
    def forward(self, x: Tensor, Rx: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(y, R{y}); R{x} is None, which is zero, up to the first weights."""

    @abstractmethod
    def backward(self, g: Tensor, Rg: Tensor) -> tuple[Tensor, Tensor]:
        """df/dx and its R from df/dy and its R; at the first weights, where nobody needs them, whatever."""


class Weighted(Layer):
    """y = W x + b, with W and b along U and v; the product of W and x is what kinds of layers differ in."""

    def __init__(self, layer: Any, u: Sequence[Tensor]) -> None:
        super().__init__(layer, u)
        self.W, self.b = layer.weight, layer.bias
        self.U, self.v = u[0], u[1] if len(u) == 2 else None


class Dense(Weighted):
    """Matrix products."""

    def forward(self, x: Tensor, Rx: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self.x, self.Rx = x, Rx
        Ry = F.linear(x, self.U, self.v)
        return F.linear(x, self.W, self.b), Ry if Rx is None else Ry.addmm_(Rx, self.W.t())

    def backward(self, g: Tensor, Rg: Tensor) -> tuple[Tensor, Tensor]:
        slope = Rg.t() @ self.x
        self.slopes = [slope] if self.b is None else [slope, Rg.sum(0)]
        if self.Rx is None:
            return g, Rg
        slope.addmm_(g.t(), self.Rx)
        return g @ self.W, (Rg @ self.W).addmm_(g, self.U)


class Convolution(Weighted):
    """Convolutions."""

    def forward(self, x: Tensor, Rx: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self.x, self.Rx = x, Rx
        Ry = self._convolve(x, self.U, self.v)
        return self._convolve(x, self.W, self.b), Ry if Rx is None else Ry.add_(self._convolve(Rx, self.W, None))

    def backward(self, g: Tensor, Rg: Tensor) -> tuple[Tensor, Tensor]:
        inner, bias = self.Rx is not None, self.b is not None
        Rg_in, slope, bias_slope = self._transposed(Rg, self.x, self.W, inner, True, bias)
        self.slopes = [slope, bias_slope] if bias else [slope]
        if self.Rx is None:
            return g, Rg
        along_U, along_Rx, _ = self._transposed(g, self.Rx, self.U, True, True, False)
        slope.add_(along_Rx)
        return self._transposed(g, self.x, self.W, True, False, False)[0], Rg_in.add_(along_U)

    def _convolve(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        layer = self.layer
        return F.conv2d(x, W, b, layer.stride, layer.padding, layer.dilation, layer.groups)

    def _transposed(self, g: Tensor, x: Tensor, W: Tensor, *wanted: bool) -> Sequence[Tensor]:
        """The slopes along x, W and b of <g, W x + b>."""
        layer, biases = self.layer, [len(W)]
        geometry = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)
        found: Sequence[Tensor] = aten.convolution_backward(g, x, W, biases, *geometry, wanted)
        return found


class Unweighted(Layer):
    """No weights, and linear wherever it is differentiable: R{x} passes like x, and R{g} like g."""

    def forward(self, x: Tensor, Rx: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.output(x), None if Rx is None else self.along(Rx)

    def backward(self, g: Tensor, Rg: Tensor) -> tuple[Tensor, Tensor]:
        return self.back(g), self.back(Rg)

    @abstractmethod
    def output(self, x: Tensor) -> Tensor:
        """The layer itself."""

    @abstractmethod
    def along(self, Rx: Tensor) -> Tensor:
        """Its linear part."""

    @abstractmethod
    def back(self, g: Tensor) -> Tensor:
        """The transpose of that."""


class Relu(Unweighted):
    """max(x, 0)."""

    def output(self, x: Tensor) -> Tensor:
        self.y = x.relu()
        return self.y

    def along(self, Rx: Tensor) -> Tensor:
        passed: Tensor = aten.threshold_backward(Rx, self.y, 0)
        return passed

    def back(self, g: Tensor) -> Tensor:
        return self.along(g)


class Pool(Unweighted):
    """The greatest pixel of each window."""

    def output(self, x: Tensor) -> Tensor:
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
        spread: Tensor = aten.max_pool2d_with_indices_backward(g, self.x, *window, layer.ceil_mode, self.greatest)
        return spread


class Dropout(Unweighted):
    """x times a mask: the one that the layer draws from the same seed."""

    def output(self, x: Tensor) -> Tensor:
        self.mask = F.dropout(torch.ones_like(x), self.layer.p, self.layer.training)
        return x * self.mask

    def along(self, Rx: Tensor) -> Tensor:
        return Rx * self.mask

    def back(self, g: Tensor) -> Tensor:
        return self.along(g)


class Flat(Unweighted):
    """Images as vectors."""

    def output(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        return self.along(x)

    def along(self, Rx: Tensor) -> Tensor:
        flat: Tensor = self.layer(Rx)
        return flat

    def back(self, g: Tensor) -> Tensor:
        return g.view(self.shape)


LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: Dense,
    nn.Conv2d: Convolution,
    nn.ReLU: Relu,
    nn.MaxPool2d: Pool,
    nn.Dropout: Dropout,
    nn.Flatten: Flat,
}


def plain_layers(network: nn.Module) -> Sequence[nn.Module]:
    """The layers of a network that is nothing but a sequence of those above; of any other, none."""
    if type(network) is not nn.Sequential or len({*network}) < len(network):
        return ()
    return tuple(network) if all(_is_plain(layer) for layer in network) else ()


def _is_plain(layer: nn.Module) -> bool:
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    frozen = not all(parameter.requires_grad for parameter in layer.parameters())
    padded = isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str))
    two = isinstance(layer, nn.MaxPool2d) and layer.return_indices
    return type(layer) in LAYERS and not (hooked or frozen or padded or two)


def hessian_vector(layers: Sequence[nn.Module], inputs: Tensor, labels: Tensor, u: Iterable[Tensor]) -> list[Tensor]:
    """H u of the mean cross-entropy; u and H u in the shapes of the layers' parameters."""
    shares = iter(u)
    passes = [LAYERS[type(layer)](layer, [next(shares) for _ in layer.parameters()]) for layer in layers]
    first = next(k for k, one in enumerate(passes) if isinstance(one, Weighted))
    with torch.no_grad():
        x, Rx = inputs, None
        for one in passes:
            x, Rx = one.forward(x, Rx)
        assert Rx is not None
        g, Rg = _cross_entropy(x, Rx, labels)
        for one in reversed(passes[first:]):
            g, Rg = one.backward(g, Rg)
    return [slope for one in passes for slope in one.slopes]


def _cross_entropy(scores: Tensor, R: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """g = (p - y) / n with p = softmax(scores), and R{g} = (p R - p <p, R>) / n."""
    p, n = scores.softmax(1), len(scores)
    pR = p * R
    return (p - F.one_hot(labels, scores.shape[1])) / n, (pR - p * pR.sum(1, keepdim=True)) / n


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)
