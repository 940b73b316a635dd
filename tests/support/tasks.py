"""Tasks without classes, as users bring them: numbers to predict, and the next character of a text that ships with Python."""

from __future__ import annotations

import codecs
import contextlib
import io

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

LENGTH = 8


def numbers(clients: int = 4) -> list[TensorDataset]:
    """Linear functions of five inputs that differ in their constant."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(30, 5, generator=generator) for _ in range(clients)]
    return [TensorDataset(x, x @ torch.linspace(-1, 1, 5) + 0.3 * client) for client, x in enumerate(inputs)]


class Line(L.LightningModule):
    """Logs a torchmetrics object, and a number whose direction nobody knows."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 1))
        self.r2 = torchmetrics.R2Score()

    def forward(self, inputs):
        return self.network(inputs).squeeze(-1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        found = self(batch[0])
        self.r2.update(found, batch[1])
        self.log("val/r2", self.r2)
        self.log("val_bias", (found - batch[1]).mean())


def text(clients: int = 3) -> list[TensorDataset]:
    """Windows of the Zen of Python, and the same one character on."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    characters = torch.tensor([min(ord(letter), 127) for letter in codecs.decode(this.s, "rot13")])
    windows = characters.unfold(0, LENGTH + 1, 7)
    return [
        TensorDataset(windows[client::clients, :-1].clone(), windows[client::clients, 1:].clone())
        for client in range(clients)
    ]


class NextCharacter(L.LightningModule):
    """A small GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(128, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 128)

    def forward(self, characters):
        return self.head(self.gru(self.embed(characters))[0])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
