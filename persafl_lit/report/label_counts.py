"""Who holds what: the client x class picture that papers show."""

from __future__ import annotations

from typing import Any

import numpy as np


def draw_labels(counts: np.ndarray, title: str, file: Any, holdout: int = 0, format: str = "png") -> None:
    """A heat map of samples per class (columns) and client (rows); a line sets held-out clients apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    clients, classes = counts.shape
    written = clients <= 40
    height = 2.0 + (0.26 * clients if written else min(9.0, 0.05 * clients + 4))
    figure, axes = plt.subplots(figsize=(2.2 + 0.55 * classes, height), layout="constrained")
    shown = np.ma.masked_equal(counts, 0)
    image = axes.imshow(shown, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
    axes.set_facecolor("#f2f2f2")
    axes.set(title=title, xlabel="class", ylabel="client", xticks=range(classes))
    if written:
        axes.set_yticks(range(clients))
        dark = counts < 0.6 * counts.max()
        for client, kind in zip(*np.nonzero(counts), strict=True):
            axes.text(
                kind,
                client,
                counts[client, kind],
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark[client, kind] else "black",
            )
    if holdout:
        axes.axhline(clients - holdout - 0.5, color="#D55E00", linewidth=2)
        axes.annotate(
            "never train",
            (classes - 0.5, clients - holdout - 0.5),
            ha="right",
            va="bottom",
            color="#D55E00",
            fontsize=8,
        )
    figure.colorbar(image, label="samples")
    figure.savefig(file, dpi=150, format=format)
    plt.close(figure)
