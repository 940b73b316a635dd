"""Measured against bound, drawn: over T, over tau, the floors, and the uneven schedule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from persafl_lit.theory.study import Study

# Okabe and Ito's colours, one per option as in reports: green, blue, vermillion.
OPTION_COLOURS = {"a": "#009E73", "b": "#0072B2", "c": "#D55E00"}
GREY = "#777777"


def draw_studies(studies: Sequence[Study], target: str | os.PathLike[str] | IO[bytes], format: str = "png") -> None:
    """One row of three panels per option: over T, the effect of tau, and the floor (A: the uneven schedule)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(studies), 3, figsize=(13.5, 4.0 * len(studies)), squeeze=False, layout="constrained"
    )
    for line, found in zip(axes, studies, strict=True):
        _over_time(line[0], found)
        _over_staleness(line[1], found)
        (_uneven if found.option == "a" else _floor)(line[2], found)
        for panel in line:
            panel.grid(which="major", color="#E5E5E5", linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=130, format=format)
    plt.close(figure)


def _logarithmic(axes: Axes, x: Any) -> None:
    """Log-log, with ticks at the values that were run."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value / 1000:,.0f}k")
    )
    axes.yaxis.set_minor_formatter(NullFormatter())


def _over_time(axes: Axes, found: Study) -> None:
    from persafl_lit.theory.bounds import THEOREMS

    tau = max(row["tau"] for row in found.rows)
    rows = [row for row in found.rows if row["tau"] == tau]
    T = np.array([row["T"] for row in rows], dtype=float)
    measured = np.array([row["measured"] for row in rows])
    errors = np.array([[row["measured"] - row["low"], row["high"] - row["measured"]] for row in rows]).T
    slope = found.slopes["T"]
    axes.plot(T, [row["bound"] for row in rows], "--", color=GREY, marker="_", label="bound")
    axes.errorbar(
        T,
        measured,
        errors,
        color=OPTION_COLOURS[found.option],
        marker="o",
        markersize=4,
        capsize=3,
        label=f"measured: slope {slope.value:.3f}",
    )
    axes.plot(T, measured[0] * (T / T[0]) ** -0.5, ":", color="#222222", linewidth=1, label=r"$T^{-1/2}$")
    _logarithmic(axes, T)
    axes.set_title(f"Option {found.option.upper()}, Theorem {THEOREMS[found.option]}, tau = {tau}", fontsize=10)
    axes.set(xlabel="server updates T", ylabel=r"average of $|\nabla F(w^t)|^2$")
    axes.legend(frameon=False, fontsize=8)


def _over_staleness(axes: Axes, found: Study) -> None:
    if not found.staleness:
        axes.set_axis_off()
        return
    about = found.staleness
    tau = np.array(about["tau"], dtype=float)
    effects = np.array(about["effect"])
    for j, T in enumerate(about["T"]):
        y = np.where(effects[:, j] > 0, effects[:, j], np.nan)
        axes.plot(
            tau, y, color=OPTION_COLOURS[found.option], alpha=1 - 0.22 * j, marker="o", markersize=4, label=f"T = {T:,}"
        )
    first = effects[-1, 0]
    axes.plot(tau, first * (tau / tau[-1]) ** 2, ":", color="#222222", linewidth=1, label=r"$\tau^2$")
    slopes = f"slope in tau {found.slopes['tau'].value:.2f}"
    if "tau_over_T" in found.slopes:
        slopes += f", in T {found.slopes['tau_over_T'].value:.2f}"
    _logarithmic(axes, tau)
    axes.set_title(f"What staleness adds; {slopes}", fontsize=10)
    axes.set(xlabel=r"largest staleness $\tau$", ylabel="measured(tau) - measured(0)")
    axes.legend(frameon=False, fontsize=8)


def _floor(axes: Axes, found: Study) -> None:
    names = list(found.floor["over"])
    markers = {"alpha": "o", "nu": "o", "b": "s"}
    x_all = []
    for name in names:
        x = np.array(found.floor["over"][name])
        x = x / x[0]
        x_all += x.tolist()
        slope = found.slopes[f"floor_{name}"]
        label = f"measured over {name}: slope {slope.value:.2f} [{slope.low:.2f}, {slope.high:.2f}]"
        colour = OPTION_COLOURS[found.option]
        axes.plot(
            x, found.floor["bound"][name], "--", color=GREY, marker="_", label="bound" if name == names[0] else None
        )
        axes.plot(
            x,
            found.floor["measured"][name],
            color=colour,
            marker=markers[name],
            markersize=4,
            linestyle="-" if name != "b" else "-.",
            label=label,
        )
        if "limit" in found.floor:
            axes.plot(
                x,
                found.floor["limit"][name],
                ":",
                color="#222222",
                linewidth=1.2,
                label="exact limit" if name == names[0] else None,
            )
    _logarithmic(axes, sorted({round(value, 6) for value in x_all}))
    axes.set_title(f"What remains as T grows (T = {found.floor['T']:,})", fontsize=10)
    axes.set(xlabel=f"{' or '.join(names)}, relative to the smallest", ylabel=r"$|\mathrm{mean}\ \nabla F|^2$")
    axes.legend(frameon=False, fontsize=8)


def _uneven(axes: Axes, found: Study) -> None:
    if not found.uneven:
        axes.set_axis_off()
        return
    about = found.uneven
    axes.plot(about["T"], about["bound"], "--", color=GREY, marker="_", label="bound")
    axes.plot(
        about["T"],
        about["asynchronous"],
        color="#BF812D",
        marker="s",
        markersize=4,
        label="asynchronous: fast clients arrive more often",
    )
    axes.plot(
        about["T"], about["drawn"], color=OPTION_COLOURS["a"], marker="o", markersize=4, label="drawn: Assumption 1"
    )
    axes.axhline(
        about["limit"], color="#BF812D", linestyle=":", linewidth=1.2, label="limit of the asynchronous schedule"
    )
    _logarithmic(axes, about["T"])
    axes.set_title(f"When clients do not arrive uniformly, tau = {about['tau']}", fontsize=10)
    axes.set(xlabel="server updates T", ylabel=r"average of $|\nabla f(w^t)|^2$")
    axes.legend(frameon=False, fontsize=8)
