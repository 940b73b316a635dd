"""Networks. Adding one: a dataclass here with its settings, a line in the table, a YAML in conf/model.

Settings are read without torch, so `network` imports it when it is called.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from persafl_lit.common.limits import MOST_LAYERS, MOST_WEIGHTS
from persafl_lit.errors import ConfigError, closest, first_line, shown

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
INITS = ("torch", "kaiming")


@dataclass(frozen=True)
class _Cnn:
    """l convolutions with pooling, then l fully connected layers with dropout: the paper's networks.

    Max-pooling comes before ReLU: the two commute exactly, and this order is faster.
    """

    channels: tuple[int, ...]
    """Channels of each convolution."""
    hidden: tuple[int, ...]
    """Widths of the fully connected layers, without the last."""
    kernel: int = 3
    """Side of the convolutions' kernels."""
    padding: int = 1
    """Zeros around the images."""
    dropout: float = 0.2
    """Share of the inputs of a fully connected layer that are dropped."""
    init: str = "torch"
    """First weights: torch (PyTorch's default) or kaiming (He et al.: normal with variance 2/inputs, biases 0)."""

    def __post_init__(self) -> None:
        depth = len(type(self).channels)  # type: ignore[misc]
        if len(self.channels) != depth or len(self.hidden) != depth - 1:
            raise ConfigError(
                f"this network has {depth} convolutions and {depth} fully connected layers: model.channels "
                f"needs {depth} values and "
                f"model.hidden {depth - 1}; got {shown(list(self.channels))} and {shown(list(self.hidden))}"
            )
        _check_sizes(channels=self.channels, hidden=self.hidden, kernel=(self.kernel,))
        _check_dropout(self.dropout)
        _check_init(self.init)
        if self.padding < 0:
            raise ConfigError(f"model.padding must be >= 0; got {self.padding}")

    def network(self, shape: Shape, classes: int) -> nn.Module:
        from torch import nn

        if len(shape) != 3:
            raise ConfigError(
                f"a convolutional network needs images (channels, height, width); this data has the shape {shape}: use "
                "model=mlp, model=logistic or a model of yours"
            )
        _check_weights(sum(a * b for a, b in itertools.pairwise((shape[0], *self.channels))) * self.kernel**2)
        layers: list[nn.Module] = []
        inside, height, width = shape
        for outside in self.channels:
            layers += [nn.Conv2d(inside, outside, self.kernel, padding=self.padding), nn.MaxPool2d(2), nn.ReLU()]
            inside = outside
            height, width = ((side + 2 * self.padding - self.kernel + 1) // 2 for side in (height, width))
            if min(height, width) < 1:
                raise ConfigError(
                    f"images of {shape[1]}x{shape[2]} pixels are too small for {len(self.channels)} convolutions with "
                    f"model.kernel={self.kernel} and model.padding={self.padding}"
                )
        dense = _dense(inside * height * width, self.hidden, classes, self.dropout)
        return _initialised(nn.Sequential(*layers, nn.Flatten(), *dense), self.init)


@dataclass(frozen=True)
class Cnn2(_Cnn):
    """Two convolutions and two fully connected layers (the paper's network for MNIST)."""

    channels: tuple[int, ...] = (16, 32)
    hidden: tuple[int, ...] = (64,)


@dataclass(frozen=True)
class Cnn3(_Cnn):
    """Three convolutions and three fully connected layers (the paper's network for CIFAR-10)."""

    channels: tuple[int, ...] = (32, 64, 64)
    hidden: tuple[int, ...] = (128, 64)


@dataclass(frozen=True)
class Mlp:
    """Fully connected layers with ReLU and dropout."""

    hidden: tuple[int, ...] = (64,)
    """Widths of the hidden layers."""
    dropout: float = 0.0
    """Share of a layer's inputs that are dropped."""
    init: str = "torch"
    """First weights: torch (PyTorch's default) or kaiming (He et al.: normal with variance 2/inputs, biases 0)."""

    def __post_init__(self) -> None:
        _check_sizes(hidden=self.hidden)
        _check_dropout(self.dropout)
        _check_init(self.init)

    def network(self, shape: Shape, classes: int) -> nn.Module:
        from torch import nn

        return _initialised(
            nn.Sequential(nn.Flatten(), *_dense(math.prod(shape), self.hidden, classes, self.dropout)), self.init
        )


@dataclass(frozen=True)
class Logistic:
    """Multinomial logistic regression: convex, tiny, fast."""

    def network(self, shape: Shape, classes: int) -> nn.Module:
        from torch import nn

        _check_weights(math.prod(shape) * classes)
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


@dataclass(frozen=True)
class Torchvision:
    """A classification network of torchvision, with first weights of its own and its first convolution for the data's
    channels."""

    arch: str = "resnet18"
    """Its name in torchvision: resnet18, mobilenet_v3_small, efficientnet_b0, vit_b_16, ..."""
    norm: Literal["batch", "group"] = "batch"
    """`group` puts GroupNorm, with gcd(32, channels) groups, in the place of every BatchNorm2d."""

    def network(self, shape: Shape, classes: int) -> nn.Module:
        import torch
        from torchvision import models

        known = models.list_models(module=models)
        if self.arch not in known:
            raise ConfigError(
                f"unknown model.arch {shown(self.arch)}; torchvision has {len(known)} classification "
                f"networks.{closest(self.arch, known)}"
            )
        if len(shape) != 3:
            raise ConfigError(
                f"model.arch={self.arch} needs images (channels, height, width); this data has the shape {shape}"
            )
        _check_weights(
            next(iter(models.get_model_weights(self.arch))).meta["num_params"] - 1000 * 1001
        )  # theirs are for 1000 classes
        more: dict[str, Any] = {}
        if self.arch in ("googlenet", "inception_v3"):
            more = {"aux_logits": False, "init_weights": True}
        elif self.arch.startswith("vit"):
            more = {"image_size": shape[1]}
        elif self.arch.startswith("maxvit"):
            more = {"input_size": shape[1:]}
        try:
            network: nn.Module = models.get_model(self.arch, weights=None, num_classes=classes, **more)
            _take_channels(network, shape[0])
            if self.norm == "group":
                _without_batchnorm(network)
            training = network.training
            with torch.no_grad():
                network.eval()(torch.zeros(2, *shape))
        except Exception as error:  # torchvision and its layers raise many types; each is about the shape
            raise ConfigError(
                f"model.arch={self.arch} cannot take images of {'x'.join(map(str, shape[1:]))} pixels: "
                f"{first_line(error)}"
            ) from error
        return network.train(training)


@dataclass(frozen=True)
class VectorModel:
    """The vector w itself, for data=quadratic."""


@dataclass(frozen=True)
class Custom:
    """A LightningModule of yours: `path` is package.module.Class, `args` what its constructor takes."""

    path: str
    """package.module.Class of a LightningModule."""
    args: dict[str, Any] = field(default_factory=dict)
    """What its constructor takes: `model.args.width=64`."""


MODELS = {
    "cnn2": Cnn2,
    "cnn3": Cnn3,
    "mlp": Mlp,
    "logistic": Logistic,
    "torchvision": Torchvision,
    "point": VectorModel,
    "custom": Custom,
}


def _dense(inside: int, hidden: tuple[int, ...], classes: int, dropout: float) -> list[nn.Module]:
    from torch import nn

    from persafl_lit.models.dropout import Dropout

    _check_weights(sum(a * b for a, b in itertools.pairwise((inside, *hidden, classes))))
    layers: list[nn.Module] = []
    for outside in hidden:
        layers += [Dropout(dropout), nn.Linear(inside, outside), nn.ReLU()]
        inside = outside
    return [*layers, Dropout(dropout), nn.Linear(inside, classes)]


def _take_channels(network: nn.Module, channels: int) -> None:
    """Replace the first convolution by one of the same kind for so many channels."""
    from torch import nn

    name, first = next((name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d))
    if first.in_channels != channels:
        sides: Any = {
            "stride": first.stride,
            "padding": first.padding,
            "dilation": first.dilation,
            "bias": first.bias is not None,
        }
        network.set_submodule(name, nn.Conv2d(channels, first.out_channels, first.kernel_size, **sides))  # type: ignore[arg-type]
    if getattr(network, "transform_input", False):
        network.transform_input = False  # type: ignore[assignment]  # which is for three channels


def _without_batchnorm(network: nn.Module) -> None:
    from torch import nn

    for name, layer in [*network.named_modules()]:
        if isinstance(layer, nn.BatchNorm2d):
            network.set_submodule(name, nn.GroupNorm(math.gcd(32, layer.num_features), layer.num_features))


def _initialised(network: nn.Module, init: str) -> nn.Module:
    from torch import nn

    if init == "kaiming":
        for layer in network.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer.bias is not None:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
    return network


def _check_sizes(**sizes: tuple[int, ...]) -> None:
    for name, values in sizes.items():
        if any(value < 1 for value in values):
            raise ConfigError(
                f"model.{name} must be >= 1; got {shown(list(values) if len(values) != 1 else values[0])}"
            )
        if len(values) > MOST_LAYERS:
            raise ConfigError(f"model.{name} must have at most {MOST_LAYERS} values; got {len(values)}")


def _check_weights(count: int) -> None:
    """Before torch allocates them."""
    if count > MOST_WEIGHTS:
        raise ConfigError(
            f"this network would have {count:,} weights or more, beyond the {MOST_WEIGHTS:,} that are "
            "trained; make it smaller"
        )


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout must lie in [0, 1); got {dropout!r}")


def _check_init(init: str) -> None:
    if init not in INITS:
        raise ConfigError(f"model.init must be {' or '.join(INITS)}; got {shown(init)}")
