"""Backbones: from settings, from a class of the user's, or checked as they are given.

A *backbone* is any LightningModule whose `training_step(batch, batch_idx)` returns a loss; where accuracy is wanted,
its `forward(inputs)` gives class scores. Its `configure_optimizers` is used only with `local.optimizer=module`.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn

from persafl_lit.common.plugins import exits_refused, import_path
from persafl_lit.common.seeding import torch_seed
from persafl_lit.data import Federation, Quadratics
from persafl_lit.errors import ConfigError, ModelError, located, shown
from persafl_lit.models.classifier import CLASSIFIERS, QuadraticModel
from persafl_lit.models.networks import Custom, VectorModel


def build_backbone(model: Any, federation: Federation, seed: int, allow_code: bool = False) -> L.LightningModule:
    """The backbone that the model's settings describe, for this data, with weights named by the seed."""
    if isinstance(federation, Quadratics) != isinstance(model, VectorModel):
        raise ConfigError(
            "data=quadratic goes with model=point and nothing else does; leave model out and the data set "
            "chooses its own "
            f"(here: model={type(model).__name__.lower()})"
        )
    if isinstance(federation, Quadratics):
        return QuadraticModel(federation.w0)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(torch_seed(seed, "init"))
        if isinstance(model, Custom):
            return _import_backbone(model, federation, allow_code)
        return _network_for(model, federation)


def _network_for(model: Any, federation: Federation) -> L.LightningModule:
    """One of our networks, for the shape and the classes of the data."""
    name = type(model).__name__.lower()
    shape, classes = getattr(federation, "shape", ()), getattr(federation, "classes", 0)
    if not shape or not classes:
        raise ConfigError(
            f"model={name} needs samples of one shape with a label each, and this data has others; give a "
            "model of your own"
        )
    data, _ = next(federation.whole(0, "test", 1))
    if not data[0].is_floating_point():
        raise ConfigError(
            f"model={name} takes floating-point inputs, and this data has "
            f"{str(data[0].dtype).removeprefix('torch.')}, which are kept as they are; "
            "scale them to floats, or give a model of your own that embeds them"
        )
    task = getattr(federation, "task", "classification")
    if task == "tokens":
        raise ConfigError(
            f"model={name} gives one answer per sample, and this data has several labels for each; give a "
            "model of your own"
        )
    return CLASSIFIERS[task](model.network(shape, classes))


def build_from_class(cls: type[L.LightningModule], federation: Federation, seed: int) -> L.LightningModule:
    """A backbone of the user's class, with weights named by the seed."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(torch_seed(seed, "init"))
        try:
            made = cls()
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ModelError(f"cannot build the model {cls.__name__} without arguments: {located(error)}") from error
    return check_backbone(made, federation)


def _import_backbone(model: Custom, federation: Federation, allow_code: bool) -> L.LightningModule:
    if not allow_code:
        raise ConfigError(
            f"model.path={model.path} runs code from outside persafl_lit; pass allow_code=true if you trust it"
        )
    try:
        found = import_path(model.path)
        if not (isinstance(found, type) and issubclass(found, L.LightningModule)):  # nothing else is ever called
            raise TypeError(f"it is no LightningModule class but {shown(found)}")
        with exits_refused():
            made = found(**model.args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise ModelError(
            f"cannot build model.path={model.path!r} with model.args={shown(dict(model.args))}: {located(error)}"
        ) from error
    return check_backbone(made, federation)


def check_backbone(backbone: Any, federation: Federation | None = None) -> L.LightningModule:
    """Refuse what could not be trained, before anything starts; a plain nn.Sequential gets the loss of the federation's
    task."""
    if type(backbone) is nn.Sequential:
        backbone = CLASSIFIERS[getattr(federation, "task", "classification")](backbone)
    if not isinstance(backbone, L.LightningModule):
        advice = (
            f"; nn.Sequential({type(backbone).__name__}(...)) is taken, with the usual loss of the data's task"
            if isinstance(backbone, nn.Module)
            else ""
        )
        raise ConfigError(
            f"the model must be a LightningModule whose training_step returns a loss; got {type(backbone).__name__}"
            f"{advice}"
        )
    if type(backbone).training_step is L.LightningModule.training_step:
        raise ConfigError(f"{type(backbone).__name__} has no training_step(batch, batch_idx) that returns a loss")
    return backbone
