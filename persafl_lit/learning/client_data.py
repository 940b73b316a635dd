"""One client's local steps as a LightningDataModule."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from persafl_lit.data import Federation
from persafl_lit.data.federation import Batch
from persafl_lit.learning.objectives import Objective


class ClientDataModule(L.LightningDataModule):
    """One client's local steps as a LightningDataModule: `visits` visits of Q steps, the batches that the loop would
    draw."""

    def __init__(
        self,
        federation: Federation,
        client: int,
        objective: Objective,
        local_steps: int,
        batch_size: int,
        seed: int,
        visits: int = 1,
    ) -> None:
        super().__init__()
        self.federation = federation
        self.client = client
        self.objective = objective
        self.local_steps = local_steps
        self.batch_size = batch_size
        self.seed = seed
        self.visits = visits

    def steps(self, visit: int) -> list[tuple[Batch, ...]]:
        """The batches (D, D', D'', as many as the objective asks for) of each local step of a visit."""
        draws = [
            self.federation.batches(self.client, "D" + "'" * slot, visit, self.local_steps, self.batch_size, self.seed)
            for slot in range(self.objective.batches)
        ]
        return list(zip(*draws, strict=True))

    def train_dataloader(self) -> DataLoader[Any]:
        every_step = [step for visit in range(self.visits) for step in self.steps(visit)]
        return DataLoader(every_step, batch_size=None)  # type: ignore[arg-type]
