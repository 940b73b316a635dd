"""Personalised methods in rounds and asynchronously, and FedPer, FedRep and Ditto beside PFLlib's procedure."""

from __future__ import annotations

import pandas as pd

from rendering.exported import HERE, NAMES, PAIRS, Results, load
from rendering.page import Page, verdict
from rendering.sweeps import provenance

PERSONAL = ("fedper", "fedrep", "lg_fedavg", "ditto", "apfl")
"""Methods that run on both schedules under one name."""
ONE_SCHEDULE = ("local", "ca2fl", "ace")


def digits(page: Page) -> None:
    """The comparison on digits."""
    if (results := load("personalised_async")) is not None:
        page.add("## Digits: the asynchronous column of personalised methods")
        provenance(page, results)
        _column(page, results, results.runs)


def mnist(page: Page) -> None:
    """The comparison on MNIST, once for each number of classes per client."""
    if (results := load("personalised_async_mnist")) is not None:
        page.add("## MNIST: the asynchronous column of personalised methods")
        provenance(page, results)
        for classes, runs in results.runs.groupby("data.classes_per_client"):
            page.add(f"### With {page.number(classes, 'd')} classes per client")
            _column(page, results, runs)


def _column(page: Page, results: Results, runs: pd.DataFrame) -> None:
    """A table of every row in rounds and asynchronously, and one honest paragraph."""
    pairs = [(early, late) for early, late in PAIRS] + [(method, method) for method in (*PERSONAL, "fedadam")]
    rows, verdicts, asynchronous = [], [], {}
    for early, late in pairs:
        in_rounds, at_once = _chosen(results, runs, early, "rounds"), _chosen(results, runs, late, "asynchronous")
        if in_rounds.empty and at_once.empty:
            continue
        name = NAMES[early] if early == late else f"{NAMES[early]} / {NAMES[late]}"
        said = "-" if in_rounds.empty or at_once.empty else page.difference(at_once, in_rounds)
        rows.append([name, _mean(page, in_rounds), _mean(page, at_once), said])
        if said != "-":
            verdicts.append(verdict(at_once, in_rounds))
        if not at_once.empty:
            asynchronous[late] = at_once
    for method in ONE_SCHEDULE:
        if not (found := _chosen(results, runs, method, "asynchronous")).empty:
            rows.append([NAMES[method], "-", _mean(page, found), "-"])
            asynchronous[method] = found
    page.add(
        "Test accuracy after the same fine-tuning, at the same simulated time; settings chosen on validation data, for "
        "each method and schedule. Methods whose clients keep a model are compared by that model, the others by the "
        "shared one."
    )
    page.table(["method (in rounds / asynchronous)", "rounds", "asynchronous", "asynchronous - rounds, paired"], rows)
    best = max(asynchronous, key=lambda method: asynchronous[method].mean())
    alone, base = asynchronous.get("local"), asynchronous.get("fedasync")
    compared = sum(len(asynchronous) - 1 for other in (base, alone) if other is not None)
    told = f"Of the asynchronous ones {NAMES[best]} has the highest mean. "
    for name, other in (("FedAsync", base), ("training alone", alone)):
        if other is not None:
            better = [
                NAMES[m] for m, test in asynchronous.items() if test is not other and verdict(test, other) == "better"
            ]
            told += f"Better than {name}, by the paired interval: {', '.join(better) or 'none'}. "
    page.add(
        f"Without waiting, the same method is better than in rounds in {page.number(verdicts.count('better'), 'd')} of "
        f"{page.number(len(verdicts), 'd')} rows, and worse in {page.number(verdicts.count('worse'), 'd')}. {told}"
        f"That is {page.number(len(verdicts) + compared, 'd')} comparisons at 95 % each, not corrected for their "
        "number, on few seeds: a narrow one may be chance, and rows that are not named are not told apart. By then a "
        "run in rounds had "
        f"{page.number(_updates(runs, 'rounds'), '.0f')} updates on average and one without waiting "
        f"{page.number(_updates(runs, 'asynchronous'), '.0f')}: what clients keep was trained as much more often."
    )


def _updates(runs: pd.DataFrame, schedule: str) -> float:
    return float(runs[runs["schedule.name"] == schedule].updates.mean())


def _mean(page: Page, test: pd.Series) -> str:
    return "-" if test.empty else page.mean(test)


def _chosen(results: Results, runs: pd.DataFrame, method: str, schedule: str) -> pd.Series:
    """Final test accuracy by seed of the best setting of a method on a schedule."""
    own = runs[(runs.method == method) & (runs["schedule.name"].fillna(schedule) == schedule)]
    if own.empty:
        return pd.Series(dtype=float)
    return Results(results.name, own, results.curves).test(method)


def parity(page: Page) -> None:
    """Personalised accuracy of three methods as PFLlib trains and evaluates them, and here."""
    path = HERE / "pfllib_parity" / "parity.csv"
    if not path.exists():
        return
    found = pd.read_csv(path)
    page.add(
        "## FedPer, FedRep and Ditto beside PFLlib's procedure",
        "[parity.py](pfllib_parity/parity.py) writes PFLlib's procedure anew as a plain PyTorch loop, from its public "
        "code: the same split of the digits, first weights, network, steps and rounds, every client in every round, "
        "each client's own model evaluated without fine-tuning. `loop` weighs clients by samples, as PFLlib does, in "
        "training and in the mean accuracy; `loop, unweighted` weighs them alike, as persafl_lit does. PFLlib itself "
        "was not run.",
    )
    rows, apart, below = [], [], 0
    for method, runs in found.groupby("method", sort=False):
        by = {name: group.set_index("seed").accuracy_test for name, group in runs.groupby("implementation")}
        ours = by["persafl_lit"]
        rows.append(
            [
                NAMES[str(method)],
                *(page.mean(by[name]) for name in ("persafl_lit", "loop", "loop, unweighted")),
                page.difference(ours, by["loop"]),
                page.difference(ours, by["loop, unweighted"]),
            ]
        )
        below += int(ours.mean() < by["loop"].mean())
        if verdict(ours, by["loop"]) != "undecided":
            apart.append(NAMES[str(method)])
    page.table(
        ["method", "persafl_lit", "loop", "loop, unweighted", "difference to loop", "difference to unweighted"], rows
    )
    page.add(
        f"The paired intervals tell these apart: {', '.join(apart)}."
        if apart
        else "No paired interval excludes zero, so the two are within the spread of seeds; persafl_lit's mean is below "
        f"the loop's in {page.number(below, 'd')} of {page.number(len(rows), 'd')} methods, and the intervals do not "
        "exclude differences as large as their ends."
    )
