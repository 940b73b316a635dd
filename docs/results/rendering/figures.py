"""Curves of the chosen settings."""

from __future__ import annotations

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

from rendering.exported import HERE, NAMES, Results
from rendering.page import Page

COLOURS = {
    "fedavg": "#9ecae1",
    "fedprox": "#6baed6",
    "scaffold": "#4292c6",
    "per_fedavg": "#a1d99b",
    "pfedme": "#fdae6b",
    "fedasync": "#08519c",
    "persafl_maml": "#238b45",
    "persafl_me": "#d94801",
    "fedbuff": "#54278f",
    "local": "#636363",
}


def figure(page: Page, results: Results, title: str) -> None:
    """Test accuracy of the chosen settings over simulated time and over gradient evaluations: mean, and the range of
    the seeds. Written to figures/, and shown on the page."""
    shown, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for method in results.methods():
        curves = results.curves[results.curves.trial.isin(results.chosen(method).trial)]
        for axes, axis in ((left, "sim_time"), (right, "grad_evals")):
            steps = curves.assign(point=curves.groupby("trial").cumcount()).groupby("point")
            x, mean = steps[axis].mean(), steps.accuracy_test.mean()
            axes.plot(x, mean, color=COLOURS[method], label=NAMES[method], marker="o", markersize=3)
            axes.fill_between(
                x, steps.accuracy_test.min(), steps.accuracy_test.max(), color=COLOURS[method], alpha=0.15, linewidth=0
            )
    left.set_xlabel("communication time (simulated)")
    left.set_ylabel("test accuracy after fine-tuning")
    right.set_xlabel("gradient evaluations of all clients")
    right.set_xscale("symlog", linthresh=300)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    seeds = max(len(results.chosen(method)) for method in results.methods())
    shown.suptitle(f"{title}: {'mean and range over seeds' if seeds > 1 else 'one seed'}", fontsize=11)
    (HERE / "figures").mkdir(exist_ok=True)
    shown.savefig(HERE / f"figures/{results.name}.png", dpi=120, bbox_inches="tight", metadata={"Software": None})
    plt.close(shown)
    page.add(f"![{title}](figures/{results.name}.png)")
