"""pFedMe's Table 1: which reading of that paper gives its numbers?"""

from __future__ import annotations

import pandas as pd

from rendering.exported import HERE
from rendering.page import Page

CLOSE = 0.01
"""Differences of both accuracies, added, up to which a published pair counts as reproduced."""
PUBLISHED = ("shared", "standard", "carried", "tuned")
"""What the published generator (of that time), code and command for the table do."""
READING = ["samples", "pixels", "start", "steps"]
COLUMNS = {
    "global": "shared w",
    "theta_w": "theta(w), K steps",
    "local": "local model w_R",
    "theta_R": "last theta",
    "best_global": "best shared w",
    "best_local": "best local model",
}


def published(page: Page) -> None:
    """Logistic regression, against the published means."""
    means = _means("readings.csv")
    table = pd.read_csv(HERE / "pfedme_mnist/published.csv")
    page.add("## Against published numbers: pFedMe's Table 1, MNIST, logistic regression")
    numbers = "; ".join(f"{row.model} {page.number(row.accuracy, '.4f')}" for row in table.itertuples())
    page.add(f"Published ({table.source.iloc[0]}): {numbers}.")
    target = table.set_index("model").accuracy
    nearest = _nearest(page, means, target)
    page.add(
        "[study.py](pfedme_mnist/study.py) is a numpy loop of its own, so that readings of the paper can be tried that "
        "this package refuses. Samples: `disjoint`: no sample belongs to two clients; `shared`: as the published "
        "generator dealt them at the time of the paper "
        "([corrected later](https://github.com/CharlieDinh/pFedMe/pull/13)): its position within a label was a boolean "
        "by mistake, so every client's piece of a label starts at the label's first sample, and what one client is "
        "tested on is among the training data of others. "
        "Inner start: `reset`: the inner problem starts at the local model in every local step, as the paper's "
        "algorithm says; `carried`: where the step before ended, as the published code does. Local model: the client's "
        "after its local steps, which the published code evaluates as personalised, because its list of personalised "
        "parameters is an alias of the live model. Step sizes: `same` as for the paper's curves, `tuned` as for its "
        "table. `best`: at the best evaluation, as the published scripts summarise a run. Mean over seeds:"
    )
    _tables(page, means)
    _leak(page, means, nearest)


def _leak(page: Page, means: pd.DataFrame, reading: tuple[str, ...]) -> None:
    """What it is worth that clients share samples, where a reading was tried with and without."""
    apart = ("disjoint", *reading[1:])
    if reading[0] == "shared" and apart in means.index:
        gains = means.loc[reading] - means.loc[apart]
        worth = [page.number(gains[name], "+.4f") for name in ("best_global", "best_local")]
        page.add(
            f"Against the same reading with disjoint clients, the samples that clients share are worth {worth[0]} "
            f"(shared model) and {worth[1]} (local model). In part, then, numbers of this kind measure samples that "
            "other clients train on."
        )


def hidden_layer(page: Page) -> None:
    """The table's network, whose published numbers could not be looked up."""
    if not (HERE / "pfedme_mnist/readings_dnn.csv").exists():
        return
    page.add("### Its network with one hidden layer")
    page.add(
        "The same with a hidden layer of a hundred ReLU units and the published command's step sizes. What the table "
        "gives for it could not be looked up, so this is no comparison with it, only what these readings give."
    )
    means = _means("readings_dnn.csv")
    _tables(page, means)
    _leak(page, means, PUBLISHED)


def _means(name: str) -> pd.DataFrame:
    """Mean over seeds by reading, with their number."""
    groups = pd.read_csv(HERE / "pfedme_mnist" / name).groupby(READING, sort=False)
    return groups[list(COLUMNS)].mean().assign(seeds=groups.size())


def _nearest(page: Page, means: pd.DataFrame, published: pd.Series) -> tuple[str, ...]:
    """The reading that comes nearest to the published pair, said in words."""
    target = {"best_global": published["pFedMe, global"], "best_local": published["pFedMe, personalised"]}
    ours = means.drop("fedavg", level="start")
    gaps = sum((ours[name] - value).abs() for name, value in target.items())
    nearest = gaps.idxmin()
    found = ours.loc[nearest]
    said = " and ".join(
        f"{page.number(found[name], '.4f')} for the {what} model ({page.number(found[name] - target[name], '+.4f')})"
        for name, what in {"best_global": "shared", "best_local": "personalised"}.items()
    )
    fedavg = means.xs("fedavg", level="start")
    like = fedavg[fedavg.index.get_level_values("samples") == nearest[0]]
    like = like[like.index.get_level_values("pixels") == nearest[1]]
    best = like.best_global.max()
    close = [index for index in ours.index if gaps[index] < CLOSE]
    within = f"{page.number(len(close), 'd')} of {page.number(len(ours), 'd')} readings"
    page.add(
        f"{'Reproduced' if gaps[nearest] < CLOSE else 'Not reproduced'}. Nearest comes the reading with samples "
        f"`{nearest[0]}`, pixels `{nearest[1]}`, inner start `{nearest[2]}` and step sizes `{nearest[3]}`: {said}, "
        "each at its best evaluation, and personalised being what the published code evaluates under that name."
        + (" In all four respects this is what the published code and its command do." if nearest == PUBLISHED else "")
    )
    page.add(
        f"FedAvg with these samples and pixels, at its best: {page.number(best, '.4f')} "
        f"({page.number(best - published['FedAvg'], '+.4f')}). Evaluated as pFedMe's personalised model is, each "
        f"client after its local steps, FedAvg has {page.number(like.best_local.max(), '.4f')}."
    )
    if close:
        kinds = " and ".join(f"`{kind}`" for kind in dict.fromkeys(index[0] for index in close))
        page.add(
            f"{within} come within {page.number(CLOSE, 'g')} of the published pair (both differences added), all with "
            f"samples {kinds}."
        )
    return nearest


def _tables(page: Page, means: pd.DataFrame) -> None:
    """pFedMe by reading, then FedAvg, which has no inner problem."""
    ours = means.drop("fedavg", level="start")
    page.table(
        ["samples", "pixels", "inner start", "step sizes", "seeds", *COLUMNS.values()],
        [
            [*index, page.number(int(row.seeds), "d"), *(page.number(row[name], ".4f") for name in COLUMNS)]
            for index, row in ours.iterrows()
        ],
    )
    fedavg = means.xs("fedavg", level="start")
    shown = ("global", "local", "best_global", "best_local")
    page.table(
        ["FedAvg: samples", "pixels", "step sizes", "seeds", *(COLUMNS[name] for name in shown)],
        [
            [*index, page.number(int(row.seeds), "d"), *(page.number(row[name], ".4f") for name in shown)]
            for index, row in fedavg.iterrows()
        ],
    )
