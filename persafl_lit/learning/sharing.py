"""Which parameters the clients share, and which each client keeps for itself (`method.private`)."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from persafl_lit.errors import ConfigError, shown

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Sharing:
    """FedPer (Arivazhagan et al.) and its relatives: private parameters are trained with the others, but stay with the
    client.

    An objective acts on [shared, private]; only the shared part travels. All private is training alone (method=local).
    """

    private: tuple[str, ...] = ("none",)
    """Parameters that a client keeps: none, all, head (the last layer), or patterns over their names such as
    ["*.bias"]."""

    def __post_init__(self) -> None:
        if not self.private:
            raise ConfigError("method.private names no parameters; write none to share all of them")

    def names(self, backbone: nn.Module) -> frozenset[str]:
        """The private ones among the backbone's trainable parameters."""
        found: set[str] = set()
        trainable = [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
        layers = [name.rpartition(".")[0] for name in trainable]
        patterns = {"none": [], "all": ["*"], "head": [f"{layers[-1]}.*" if layers[-1] else "*"]} if layers else {}
        for entry in self.private:
            matches = [
                name for name in trainable for pattern in patterns.get(entry, [entry]) if fnmatchcase(name, pattern)
            ]
            if not matches and entry != "none":
                raise ConfigError(
                    f"method.private={shown(entry)} matches no parameter; the model has {', '.join(trainable[:20])}"
                )
            found.update(matches)
        return frozenset(found)
