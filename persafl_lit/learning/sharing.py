"""Which parameters the clients share, and which each client keeps for itself (`method.private`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from persafl_lit.errors import ConfigError, shown

if TYPE_CHECKING:
    from torch import nn

    from persafl_lit.learning.local_optimizers import Local


@dataclass(frozen=True)
class Sharing:
    """FedPer (Arivazhagan et al.) and its relatives: private parameters are trained with the others, but stay with the
    client.

    An objective acts on [shared, private]; only the shared part travels. All private is training alone (method=local).
    """

    private: tuple[str, ...] = ("none",)
    """Parameters that a client keeps: none, all, head (the last layer), body (all but the last), norm (normalisation
    layers), first:2 or last:2 (layers), or patterns over their names such as ["*.bias"]."""
    body_steps: int | None = None
    """FedRep: so many local steps at the end of a visit move the shared part alone, those before it the private part
    alone; null moves both in every step."""

    def __post_init__(self) -> None:
        if not self.private:
            raise ConfigError("method.private names no parameters; write none to share all of them")
        if self.body_steps is not None and self.body_steps < 0:
            raise ConfigError(f"method.body_steps must be >= 0 or null; got {self.body_steps}")

    @property
    def anything_private(self) -> bool:
        """Whether private parameters are asked for; a network without normalisation layers has none for `norm`."""
        return set(self.private) != {"none"}

    def check(self, local_steps: int, local: Local) -> None:
        """Refuse turns that a visit cannot take."""
        if self.body_steps is None:
            return
        if self.body_steps > local_steps:
            raise ConfigError(
                f"method.body_steps={self.body_steps} are more than local_steps={local_steps}, of which they are the "
                "last; lower them or raise local_steps"
            )
        if not local.plain:
            raise ConfigError(
                f"method.body_steps takes turns between the private and the shared part, and "
                f"local.optimizer={local.optimizer} would move both at once; use sgd without weight decay"
            )

    def names(self, backbone: nn.Module) -> frozenset[str]:
        """The private ones among the backbone's trainable parameters."""
        trainable = [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
        found: set[str] = set()
        for entry in self.private:
            matches = _matching(entry, trainable, backbone)
            if not matches and entry not in ("none", "norm"):
                raise ConfigError(
                    f"method.private={shown(entry)} matches no parameter; the model has {', '.join(trainable[:20])}"
                )
            found.update(matches)
        return frozenset(found)

    def note(self, backbone: nn.Module) -> str | None:
        """What a user should know: nothing is private after all, or everything is."""
        private = self.names(backbone)
        if self.anything_private and not private:
            return (
                "the model has no normalisation layers with trainable parameters, so nothing is private: all "
                "parameters are shared"
            )
        trainable = sum(parameter.requires_grad for parameter in backbone.parameters())
        if "all" not in self.private and len(private) == trainable:
            return "all parameters are private: clients train alone, as method=local does"
        return None


def _matching(entry: str, trainable: list[str], backbone: nn.Module) -> list[str]:
    """The parameters that one entry of `method.private` names."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in trainable))
    chosen: list[str]
    if entry == "none":
        chosen = []
    elif entry == "all":
        return trainable
    elif entry == "norm":
        chosen = [layer for layer in layers if _normalises(backbone.get_submodule(layer))]
    elif entry == "head":
        chosen = layers[-1:]
    elif entry == "body":
        chosen = layers[:-1]
    elif numbered := re.fullmatch(r"(first|last):(\d+)", entry):
        count = int(numbered[2])
        if not 1 <= count <= len(layers):
            raise ConfigError(f"method.private={entry} must name 1 to {len(layers)} layers, which the model has")
        chosen = layers[:count] if numbered[1] == "first" else layers[-count:]
    else:
        return [name for name in trainable if fnmatchcase(name, entry)]
    return [name for name in trainable if name.rpartition(".")[0] in chosen]


def _normalises(module: nn.Module) -> bool:
    from torch import nn
    from torch.nn.modules.batchnorm import _NormBase

    return isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm))
