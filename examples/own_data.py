"""Your own data: a list with one torch Dataset per client. Run it with `python examples/own_data.py`.

Each Dataset is split into train, validation and test by `data.val_share` and `data.test_share`. The last two clients
have random transforms, which training alone reads; they are seeded by name, so that a run repeats to the last bit.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

import persafl_lit


class Strokes(Dataset):
    """Images of a horizontal, a vertical or a diagonal stroke; each client draws with a hand of its own."""

    def __init__(self, client: int, samples: int = 60) -> None:
        generator = torch.Generator().manual_seed(client)
        self.targets = torch.randint(3, (samples,), generator=generator)
        self.noise = torch.randn(samples, 1, 8, 8, generator=generator) * (0.2 + 0.1 * client)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        kind = int(self.targets[index])
        stroke = torch.zeros(8, 8)
        if kind == 2:
            stroke.fill_diagonal_(2.0)
        else:
            stroke.select(kind, 4).fill_(2.0)
        return stroke[None] + self.noise[index], kind


def main(overrides: list[str]) -> persafl_lit.Result:
    clients: list[Dataset] = [Strokes(client) for client in range(6)]
    shift = v2.RandomAffine(degrees=0, translate=(0.1, 0.1))
    clients[-2:] = [persafl_lit.Augmented(dataset, shift) for dataset in clients[-2:]]
    result = persafl_lit.run(
        ["method=persafl_me", "eta=0.05", "updates=120", "model.channels=[4,8]", *overrides], data=clients
    )
    for row in result.clients():
        print(
            f"client {row['client']:.0f}: test accuracy {row['test_accuracy']:.2f} after {row['arrivals']:.0f} updates"
        )
    print(f"mean {result.accuracy['test']:.2f}")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
