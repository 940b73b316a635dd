"""Users' LightningModules that tests name by their path or send to other processes."""

from __future__ import annotations

import os
import signal
import threading

import lightning as L
from torch import nn


class Linear(L.LightningModule):
    """Logistic regression on the digits."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, inputs):
        return self.linear(inputs.flatten(1))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Stubborn(Linear):
    """Can be copied, but not pickled."""

    def __deepcopy__(self, memo):
        return Stubborn()

    def __reduce_ex__(self, protocol):
        raise TypeError("I stay here")


class Guarded(Linear):
    """Can be neither copied nor pickled."""

    def __init__(self):
        super().__init__()
        self.guard = threading.Lock()


class Deadly(Linear):
    """Kills the process that trains it, a given number of times (a file counts)."""

    def __init__(self, folder, deaths):
        super().__init__()
        self.folder, self.deaths, self.main = str(folder), deaths, os.getpid()

    def training_step(self, batch, batch_idx):
        died = len(os.listdir(self.folder))
        if os.getpid() != self.main and died < self.deaths:
            open(os.path.join(self.folder, f"{os.getpid()}"), "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class Net(L.LightningModule):
    """Two layers, of which the first may be frozen."""

    def __init__(self, frozen=False):
        super().__init__()
        self.body, self.head = nn.Linear(64, 500), nn.Linear(500, 10)
        self.body.requires_grad_(not frozen)

    def forward(self, inputs):
        return self.head(self.body(inputs.flatten(1)).relu())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])
