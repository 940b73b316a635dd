"""Gradients and Hessian-vector products of sequences of known layers, without autograd.

The gradient is ordinary backpropagation: forward kernels, then vector-Jacobian products (vjp) from the loss to the
first weights. H u comes by Pearlmutter's R-operator (Neural Computation 6, 1994), which is forward-over-reverse
differentiation: R{x} is the derivative of x when the weights move along u, so R{w} = u and R{grad f(w)} = H u. The
forward pass carries x and R{x} (a Jacobian-vector product, jvp), the reverse pass g = df/dx and R{g}. Double backward
gives the same product, but also computes gradients that are not needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persafl_lit.models.dropout import Dropout

aten = torch.ops.aten


class Kernel(ABC):
    """Forward, vjp and R-operator kernels of one layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """y; saves what the other kernels need."""

    @abstractmethod
    def vjp(self, g: Tensor, grads: list[Tensor]) -> Tensor:
        """df/dx from g = df/dy. A layer with weights pops its gradients from the end of `grads` and fills them."""

    @abstractmethod
    def jvp(self, Rx: Tensor | None, u: Iterator[Tensor]) -> Tensor | None:
        """R{y} after `forward`. R{x} is None, which means zero, before the first weights; a layer with weights takes
        its part of u."""

    @abstractmethod
    def jvp_of_vjp(self, g: Tensor, Rg: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        """df/dx and R{df/dx} after `jvp`; fills `grads` with the layer's part of H u."""


class Weighted(Kernel):
    """y = W x + b, with W and b moving along U and v. Subclasses define the product."""

    first = False
    """Whether no layer before this one has weights, so that df/dx is not needed."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.W, self.b = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.affine(x, self.W, self.b)

    def jvp(self, Rx: Tensor | None, u: Iterator[Tensor]) -> Tensor:
        self.Rx, self.U = Rx, next(u)
        Ry = self.affine(self.x, self.U, None if self.b is None else next(u))
        return Ry if Rx is None else Ry.add_(self.affine(Rx, self.W, None))

    def jvp_of_vjp(self, g: Tensor, Rg: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        W_grad = grads[-1 if self.b is None else -2]
        Rg_in = self.vjp(Rg, grads)
        return (g, Rg) if self.Rx is None else self.add_cross_terms(g, self.Rx, W_grad, Rg_in)

    @abstractmethod
    def affine(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        """W x + b."""

    @abstractmethod
    def add_cross_terms(self, g: Tensor, Rx: Tensor, W_grad: Tensor, Rg_in: Tensor) -> tuple[Tensor, Tensor]:
        """df/dx and R{df/dx}: adds the product of g and R{x} to `W_grad` and that of g and U to `Rg_in`."""


class Dense(Weighted):
    """nn.Linear."""

    def affine(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, W, b)

    def vjp(self, g: Tensor, grads: list[Tensor]) -> Tensor:
        if self.b is not None:
            torch.sum(g, 0, out=grads.pop())
        torch.mm(g.t(), self.x, out=grads.pop())
        return g if self.first else g @ self.W

    def add_cross_terms(self, g: Tensor, Rx: Tensor, W_grad: Tensor, Rg_in: Tensor) -> tuple[Tensor, Tensor]:
        W_grad.addmm_(g.t(), Rx)
        return g @ self.W, Rg_in.addmm_(g, self.U)


class Convolution(Weighted):
    """nn.Conv2d."""

    def affine(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        layer = self.layer
        return F.conv2d(x, W, b, layer.stride, layer.padding, layer.dilation, layer.groups)

    def vjp(self, g: Tensor, grads: list[Tensor]) -> Tensor:
        g_in, W_grad, b_grad = self._convolution_vjp(g, self.x, self.W, not self.first, True, self.b is not None)
        if self.b is not None:
            grads.pop().copy_(b_grad)
        grads.pop().copy_(W_grad)
        return g if self.first else g_in

    def add_cross_terms(self, g: Tensor, Rx: Tensor, W_grad: Tensor, Rg_in: Tensor) -> tuple[Tensor, Tensor]:
        from_U, from_Rx, _ = self._convolution_vjp(g, Rx, self.U, True, True, False)
        W_grad.add_(from_Rx)
        return self._convolution_vjp(g, self.x, self.W, True, False, False)[0], Rg_in.add_(from_U)

    def _convolution_vjp(self, g: Tensor, x: Tensor, W: Tensor, *wanted: bool) -> Sequence[Tensor]:
        """The gradients of <g, W x + b> with respect to x, W and b, as far as they are wanted."""
        layer, biases = self.layer, [len(W)]
        geometry = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)
        found: Sequence[Tensor] = aten.convolution_backward.default(g, x, W, biases, *geometry, wanted)
        return found


class PiecewiseLinear(Kernel):
    """A layer without weights that is linear wherever it is differentiable, so that R{x} passes like x and R{g} like
    g."""

    def vjp(self, g: Tensor, grads: list[Tensor]) -> Tensor:
        return self.transpose(g)

    def jvp(self, Rx: Tensor | None, u: Iterator[Tensor]) -> Tensor | None:
        return None if Rx is None else self.linear(Rx)

    def jvp_of_vjp(self, g: Tensor, Rg: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.transpose(g), self.transpose(Rg)

    @abstractmethod
    def linear(self, Rx: Tensor) -> Tensor:
        """The Jacobian at x, times R{x}."""

    @abstractmethod
    def transpose(self, g: Tensor) -> Tensor:
        """The transposed Jacobian at x, times g."""


class Relu(PiecewiseLinear):
    """nn.ReLU: max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        self.y = x.relu()
        return self.y

    def linear(self, Rx: Tensor) -> Tensor:
        passed: Tensor = aten.threshold_backward.default(Rx, self.y, 0)
        return passed

    def transpose(self, g: Tensor) -> Tensor:
        return self.linear(g)


class MaxPool(PiecewiseLinear):
    """nn.MaxPool2d: the greatest pixel of each window."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        self.x = x
        y, self.greatest = F.max_pool2d_with_indices(
            x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode
        )
        return y

    def linear(self, Rx: Tensor) -> Tensor:
        pixels, greatest = (
            t.permute(0, 2, 3, 1) for t in (Rx, self.greatest)
        )  # channels_last: flattened without a copy
        return pixels.flatten(1, 2).gather(1, greatest.flatten(1, 2)).view(greatest.shape).permute(0, 3, 1, 2)

    def transpose(self, g: Tensor) -> Tensor:
        layer = self.layer
        window = (_pair(value) for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation))
        spread: Tensor = aten.max_pool2d_with_indices_backward.default(
            g, self.x, *window, layer.ceil_mode, self.greatest
        )
        return spread


class Masked(PiecewiseLinear):
    """Dropout: x times the mask that the layer draws."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        self.mask = layer.mask(x) if layer.training and layer.p else None
        return self.linear(x)

    def linear(self, Rx: Tensor) -> Tensor:
        return Rx if self.mask is None else Rx * self.mask

    def transpose(self, g: Tensor) -> Tensor:
        return self.linear(g)


class Flatten(PiecewiseLinear):
    """nn.Flatten: images as vectors."""

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.order = x.shape, torch.contiguous_format if x.is_contiguous() else torch.channels_last
        return self.linear(x)

    def linear(self, Rx: Tensor) -> Tensor:
        return Rx.flatten(1)

    def transpose(self, g: Tensor) -> Tensor:
        return g.view(self.shape).contiguous(memory_format=self.order)


KERNELS: dict[type[nn.Module], type[Kernel]] = {
    nn.Conv2d: Convolution,
    nn.MaxPool2d: MaxPool,
    nn.ReLU: Relu,
    Dropout: Masked,
    nn.Flatten: Flatten,
    nn.Linear: Dense,
}


def plain_layers(network: nn.Module) -> Sequence[nn.Module]:
    """The layers of a network that the kernels can differentiate, or none.

    Such a network is an nn.Sequential of the layers in `KERNELS` with exactly one Flatten: image layers before it,
    vector layers after it. No weights are shared or frozen."""
    layers = tuple(network) if type(network) is nn.Sequential and untouched(network) else ()
    kinds = [type(layer) for layer in layers]
    if kinds.count(nn.Flatten) != 1 or not all(map(_is_plain, layers)):
        return ()
    flat = kinds.index(nn.Flatten)
    weights = [
        weight
        for layer in layers
        if isinstance(layer, nn.Linear | nn.Conv2d)
        for weight in (layer.weight, layer.bias)
        if weight is not None
    ]
    own = [*map(id, weights)] == [*map(id, network.parameters())]  # parameters() yields a shared one only once
    return (
        layers
        if own and nn.Linear not in kinds[:flat] and {*kinds[flat + 1 :]} <= {nn.Linear, nn.ReLU, Dropout}
        else ()
    )


def untouched(module: nn.Module) -> bool:
    """Whether a module has no hooks and no methods replaced on the instance, so that its class says what it
    computes."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    tensor_hooks = [parameter._backward_hooks for parameter in module.parameters()]
    return not any([*hooks, *tensor_hooks]) and not {"forward", "training_step", "score_loss"} & vars(module).keys()


def _is_plain(layer: nn.Module) -> bool:
    frozen = not all(parameter.requires_grad for parameter in layer.parameters())
    other_padding = isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str))
    gives_indices = isinstance(layer, nn.MaxPool2d) and layer.return_indices
    flattens_less = isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1)
    return (
        type(layer) in KERNELS and untouched(layer) and not (frozen or other_padding or gives_indices or flattens_less)
    )


@torch.no_grad()
def gradient(layers: Sequence[nn.Module], inputs: Tensor, labels: Tensor, grads: list[Tensor]) -> Tensor:
    """The mean cross-entropy; writes its gradient into `grads`, one tensor for each parameter of the plain layers, in
    their order.

    The reverse pass ends at the first weights: df/dx of the inputs is not needed."""
    kernels, remaining, x = _kernels(layers), [*grads], inputs
    for kernel in kernels:
        x = kernel.forward(x)
    loss, g, _ = _cross_entropy(x, labels)
    while remaining:
        g = kernels.pop().vjp(g, remaining)
    return loss


@torch.no_grad()
def hessian_vector(
    layers: Sequence[nn.Module], inputs: Tensor, labels: Tensor, u: Iterable[Tensor], grads: list[Tensor]
) -> None:
    """Writes H u of the mean cross-entropy into `grads`; u has the same shapes."""
    kernels, remaining, parts = _kernels(layers), [*grads], iter(u)
    x, Rx = inputs, None
    for kernel in kernels:
        x = kernel.forward(x)
        Rx = kernel.jvp(Rx, parts)
    assert Rx is not None
    _, g, log_p = _cross_entropy(x, labels)
    p = log_p.exp()
    pR = p * Rx
    Rg = (pR - p * pR.sum(1, keepdim=True)) / len(p)
    while remaining:
        g, Rg = kernels.pop().jvp_of_vjp(g, Rg, remaining)


def _kernels(layers: Sequence[nn.Module]) -> list[Kernel]:
    kernels = [KERNELS[type(layer)](layer) for layer in layers]
    next(kernel for kernel in kernels if isinstance(kernel, Weighted)).first = True
    return kernels


def _cross_entropy(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its gradient (p - y) / n with respect to the scores, and log p with p = softmax(scores): the calls that
    autograd makes."""
    log_p = scores.log_softmax(1)
    weight, mean, ignored = None, 1, -100  # the defaults of F.nll_loss
    loss, n = aten.nll_loss_forward.default(log_p, labels, weight, mean, ignored)
    log_p_grad = aten.nll_loss_backward.default(torch.ones_like(loss), log_p, labels, weight, mean, ignored, n)
    return loss, aten._log_softmax_backward_data.default(log_p_grad, log_p, 1, log_p.dtype), log_p


def _pair(value: int | Sequence[int]) -> Sequence[int]:
    return (value, value) if isinstance(value, int) else tuple(value)
