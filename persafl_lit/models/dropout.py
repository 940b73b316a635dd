"""Dropout whose mask is drawn more than twice as fast on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """nn.Dropout, its mask drawn by `torch.rand` and not by `Tensor.bernoulli_`."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask(x) if self.training and self.p else x

    def mask(self, x: Tensor) -> Tensor:
        """In the shape of x: 0 with probability p, else 1 / (1 - p). A function of the state of torch's default
        generator."""
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        fine = torch.promote_types(x.dtype, torch.float32)  # bfloat16 knows 256 numbers between 0 and 1
        return torch.rand(x.shape, dtype=fine, device=x.device).ge_(self.p).mul_(scale).to(x.dtype)
