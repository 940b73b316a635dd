"""CIFAR-10: why the paper's setting fails there, and how far the comparison goes."""

from __future__ import annotations

from rendering.exported import NAMES, PAIRS, Results, load
from rendering.figures import figure
from rendering.page import Page, verdict
from rendering.questions import answers
from rendering.sweeps import overview, provenance


def untrained(page: Page, results: Results) -> str:
    """What fine-tuning alone gives."""
    first = results.curves[results.curves.sim_time == 0].groupby("seed").accuracy_test.mean()
    return f"Fine-tuning the untrained model gives {page.mean(first)}."


def look(page: Page) -> None:
    """Short runs, one thing changed at a time."""
    looks = load("cifar10_look")
    assert looks is not None
    page.add("## CIFAR-10: why FedAsync does not learn there, and what it takes")
    page.add(
        "The paper's setting (thirty clients with three classes each, server steps of about one) fails under FedAsync, "
        "so short runs came first: one seed, one thing changed at a time "
        "([runs.csv](cifar10_look/runs.csv), [curves.csv](cifar10_look/curves.csv))."
    )
    rows = []
    named = looks.runs.rename(columns=lambda column: column.replace(".", "_"))
    for row in named.sort_values(["clients", "staleness_mean", "accuracy_test"]).itertuples():
        held = (
            "all data, one client, no fine-tuning"
            if row.clients == 1
            else "the same classes for all"
            if row.data_partition == "iid"
            else "three classes each"
        )
        step = page.number(row.method_beta, "g")
        measured = [
            page.number(row.staleness_mean, ".1f"),
            page.number(row.updates, "d"),
            page.number(row.accuracy_test),
        ]
        rows.append([NAMES[row.method], held, row.model_init, step, *measured])
    page.table(["method", "data", "initialisation", "server step", "mean staleness", "updates", "test accuracy"], rows)
    page.add(
        "Heterogeneity is not the cause: without staleness three classes per client train well, and with staleness "
        "even identically distributed clients do not. A likely reason: a stale update is a gradient step with a delay "
        "of as many updates, each of several local steps, and such steps are stable only while step size times "
        "curvature times delay stays small; a deep network leaves that range at once (He's initialisation) or after "
        "its first plateau (PyTorch's). In these runs a smaller server step helps, and the Moreau envelope does, too."
    )


def comparison(page: Page) -> None:
    """The paper's eight methods and grids, at a horizon that fits."""
    results = load("paper_cifar10_short")
    if results is None:
        return
    page.add("## CIFAR-10: the paper's eight methods and grids, to the longest time that was run for all")
    provenance(page, results)
    page.add(
        "The paper's methods, grids and server steps, from He's initialisation, to communication time "
        f"{page.number(results.runs.sim_time.max(), 'g')}: the full length takes many hours here and was not run. "
        f"Settings are chosen as on MNIST, among those that were run. {untrained(page, results)}"
    )
    overview(page, results)
    figure(page, results, "CIFAR-10, 30 clients with 3 of 10 classes each, the paper's grids")
    first = results.curves[results.curves.sim_time == 0].groupby("seed").accuracy_test.mean()
    below = [NAMES[method] for method in results.methods() if (results.test(method) - first).dropna().mean() < 0]
    if below:
        page.add(
            f"With these server steps training made it worse for {' and '.join(below)}: in the mean they end below the "
            "untrained model after the same fine-tuning."
        )
    answers(page, results)


def server_step(page: Page) -> None:
    """The same, with a smaller server step among the choices."""
    results = load("cifar10_server_step")
    assert results is not None
    page.add("## CIFAR-10: with a smaller server step among the choices")
    provenance(page, results)
    rows = []
    for row in results.runs.sort_values(["method", "method.beta", "seed"]).to_dict("records"):
        cells = [
            page.number(row["method.beta"], "g"),
            page.number(row["seed"], "d"),
            page.number(row["versions"], "d"),
            page.number(row["accuracy_val"]),
        ]
        rows.append([NAMES[row["method"]], *cells, page.number(row["accuracy_test"])])
    page.table(["method", "server step", "seed", "versions", "validation", "test"], rows)
    figure(page, results, "CIFAR-10, chosen among server steps from 0.2")
    page.add(f"{untrained(page, results)} The questions again, each method with the server step that validation chose:")
    answers(page, results)
    base = results.test("fedasync")
    below = [name for name in ("persafl_maml", "persafl_me") if verdict(results.test(name), base) == "worse"]
    if below:
        names = " and ".join(NAMES[method] for method in below)
        page.add(
            f"With a server step that suits stale updates FedAsync is ahead of {names}: "
            "what the paper's grid shows between them depends on its server steps."
        )


def synchronous(page: Page) -> None:
    """More time for the synchronous methods."""
    results, reference = load("synchronous_cifar10"), load("cifar10_server_step")
    if results is None or reference is None:
        return
    page.add("## CIFAR-10: the synchronous methods given more time")
    provenance(page, results)
    page.add(untrained(page, results))
    overview(page, results)
    figure(page, results, "CIFAR-10, synchronous methods given more time")
    end, rows = float(reference.runs.sim_time.max()), []
    for early, late in PAIRS:
        if early in results.methods() and late in reference.methods():
            level = reference.test(late).mean()
            time = results.reached(early, level)
            which = f"{NAMES[early]} reaches {page.number(level)}, which {NAMES[late]} has at time "
            which += page.number(end, "g")
            rows.append([which, "not reached" if time is None else f"by time {page.number(time, 'g')}"])
    page.table(["level (from the section before)", "first evaluation at which it is there"], rows)
    rises = {}
    for method in results.methods():
        curves = results.curves[results.curves.trial.isin(results.chosen(method).trial)]
        last = curves.groupby("sim_time").accuracy_test.mean().iloc[-2:]
        rises[method] = last.iloc[1] - last.iloc[0]
    told = ", ".join(f"{NAMES[method]} {page.number(rise, '+.3f')}" for method, rise in rises.items())
    page.add(f"From the last evaluation but one to the last: {told}. Nothing here says that they have flattened.")
