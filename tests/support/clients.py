"""One client's parts, and the same client under Lightning's own Trainer."""

from __future__ import annotations

import warnings

import lightning as L

from persafl_lit.data import Digits
from persafl_lit.engine.executors import Work
from persafl_lit.learning.personalisation import Finetune
from persafl_lit.models.backbone import build_backbone
from persafl_lit.models.networks import Mlp


def parts(objective, seed=0, local_steps=4):
    """Digits for six clients, a small network with dropout, and the work that a worker gets."""
    federation = Digits().federation(6, seed)
    backbone = build_backbone(Mlp(hidden=(8,), dropout=0.3), federation, seed)
    return federation, backbone, Work(backbone, federation, objective, {"none": Finetune()}, local_steps, 0.05, 8, seed)


def fit(module, data, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=data)
    return trainer
