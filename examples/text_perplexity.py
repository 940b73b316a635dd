"""Next-character prediction with a small GRU, measured by perplexity: `python examples/text_perplexity.py`.

Each client holds some lines of a text that ships with Python. Token ids stay integers; the loss is the module's own.
"""

import codecs
import contextlib
import io
import sys

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import persafl_lit

LENGTH = 20


class NextCharacter(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(128, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 128)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.gru(self.embed(characters))[0])
        return scores

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        characters, following = batch
        return F.cross_entropy(self(characters).flatten(0, 1), following.flatten())


def clients(count: int) -> list[TensorDataset]:
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    text = torch.tensor([min(ord(letter), 127) for letter in codecs.decode(this.s, "rot13")])
    windows = text.unfold(0, LENGTH + 1, 3)
    return [
        TensorDataset(windows[client::count, :-1].clone(), windows[client::count, 1:].clone())
        for client in range(count)
    ]


def main(overrides: list[str]) -> None:
    settings = ["method=fedasync", "eta=0.5", "updates=60", "eval.every=15", "eval.metrics=[perplexity]", *overrides]
    result = persafl_lit.run(settings, NextCharacter, data=clients(6))
    for time, perplexity in zip(result.curves()["sim_time"], result.curves()["perplexity.test"], strict=True):
        print(f"time {time:5.1f}: perplexity {perplexity:.1f} on the clients' test data, after fine-tuning")


if __name__ == "__main__":
    main(sys.argv[1:])
