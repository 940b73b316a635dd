"""Render docs/results/README.md and its figures from the CSV files beside it: `make results`.

No number of the page is typed by hand: each goes through `Page.number`, and a test renders the page again and compares.
A folder here is one sweep of sweeps/, exported by `persafl report NAME --out docs/results/NAME`: runs.csv has one row
per trial, curves.csv one row per evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

HERE = Path(__file__).parent
SWEEPS = HERE.parents[1] / "sweeps"
CLOSE = 0.01
"""Differences of both accuracies, added, up to which a published pair counts as reproduced."""
PAIRS = (("fedavg", "fedasync"), ("per_fedavg", "persafl_maml"), ("pfedme", "persafl_me"))
"""Each synchronous method and its asynchronous counterpart."""
ASYNCHRONOUS = tuple(late for _, late in PAIRS)
NAMES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "per_fedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "fedasync": "FedAsync",
    "persafl_maml": "PersA-FL-MAML",
    "persafl_me": "PersA-FL-ME",
    "fedbuff": "FedBuff",
    "local": "local training",
}
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


# -- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """One exported sweep; only finished trials."""

    name: str
    runs: pd.DataFrame
    curves: pd.DataFrame
    failed: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Trials that have no result, such as those that diverged."""

    @property
    def settings(self) -> list[str]:
        """The varied keys."""
        return [column for column in self.runs if "." in column]

    def methods(self) -> list[str]:
        return [method for method in NAMES if method in set(self.runs.method)]

    def chosen(self, method: str) -> pd.DataFrame:
        """The rows of a method's best setting: highest mean validation accuracy among those that were run on most
        seeds."""
        rows = self.runs[self.runs.method == method]
        groups = (
            [group.sort_values("seed") for _, group in rows.groupby(self.settings, dropna=False)]
            if self.settings
            else [rows]
        )
        most = max(len(group) for group in groups)
        return max((group for group in groups if len(group) == most), key=lambda group: group.accuracy_val.mean())

    def setting(self, method: str) -> dict[str, float]:
        """What was chosen: the numbers among the varied keys that the method has."""
        row = self.chosen(method).iloc[0]
        return {
            key.split(".")[-1]: row[key]
            for key in self.settings
            if isinstance(row[key], (int, float)) and not pd.isna(row[key])
        }

    def test(self, method: str) -> pd.Series:
        """Final test accuracy by seed."""
        return self.chosen(method).set_index("seed").accuracy_test

    def curve(self, trial: str) -> pd.DataFrame:
        return self.curves[self.curves.trial == trial].sort_values("sim_time")

    def around(self, method: str, axis: str, limit: pd.Series) -> tuple[pd.Series, pd.Series]:
        """Test accuracy by seed at the evaluations around a limit: the last one within it, and the first one that is
        not below it."""
        within, beyond = {}, {}
        for row in self.chosen(method).itertuples():
            if row.seed in limit.index:
                curve = self.curve(row.trial)
                within[row.seed] = curve[curve[axis] <= limit[row.seed]].accuracy_test.iloc[-1]
                beyond[row.seed] = curve[curve[axis] >= min(limit[row.seed], curve[axis].max())].accuracy_test.iloc[0]
        return pd.Series(within), pd.Series(beyond)


def load(name: str) -> Results | None:
    """The exported results of a sweep, or None where there are none yet."""
    folder = HERE / name
    if not (folder / "runs.csv").exists():
        return None
    runs, curves = pd.read_csv(folder / "runs.csv"), pd.read_csv(folder / "curves.csv")
    finished = runs[runs.status == "FINISHED"].reset_index(drop=True)
    return Results(name, finished.astype({"versions": int}), curves, runs[runs.status == "FAILED"])


# -- statistics -------------------------------------------------------------------------------------------------------


def interval(values: pd.Series) -> tuple[float, float] | None:
    """95 % confidence interval of a mean (Student's t); None for fewer than two values."""
    if len(values) < 2:
        return None
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return values.mean() - half, values.mean() + half


def verdict(first: pd.Series, second: pd.Series) -> str:
    """What the paired interval of first - second says."""
    between = interval((first - second).dropna())
    if between is None:
        return "undecided"
    return "better" if between[0] > 0 else "worse" if between[1] < 0 else "undecided"


# -- the page ---------------------------------------------------------------------------------------------------------


@dataclass
class Page:
    """Markdown whose numbers are computed; `numbers` remembers each as it was written."""

    lines: list[str] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)

    def add(self, *paragraphs: str) -> None:
        for paragraph in paragraphs:
            self.lines += [paragraph, ""]

    def number(self, value: float, form: str = ".3f") -> str:
        text = format(value, form)
        self.numbers.add(text.lstrip("+-"))
        return text

    def mean(self, values: pd.Series) -> str:
        """Mean with its interval."""
        between = interval(values)
        if between is None:
            return f"{self.number(values.mean())} (one seed)"
        return f"{self.number(values.mean())} [{self.number(between[0])}, {self.number(between[1])}]"

    def difference(self, first: pd.Series, second: pd.Series) -> str:
        """Mean of first - second over the seeds that both have, its paired interval, and what that says."""
        gaps = (first - second).dropna()
        between = interval(gaps)
        if between is None:
            return f"{self.number(gaps.mean(), '+.3f')} (one seed: no interval)"
        low, high = (self.number(end, "+.3f") for end in between)
        return f"{self.number(gaps.mean(), '+.3f')} [{low}, {high}], {verdict(first, second)}"

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        self.lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]

    def text(self) -> str:
        return "\n".join(self.lines).rstrip() + "\n"


def overview(page: Page, results: Results) -> None:
    rows = []
    for method in results.methods():
        chosen = results.chosen(method)
        test = results.test(method)
        rows.append(
            [
                NAMES[method],
                ", ".join(f"{key} = {page.number(value, 'g')}" for key, value in results.setting(method).items())
                or "-",
                page.number(len(chosen), "d"),
                page.number(chosen.versions.mean(), ",.0f"),
                page.number(chosen.grad_evals.mean(), ",.0f"),
                page.number(chosen.accuracy_val.mean()),
                page.mean(test),
                page.number(test.std(ddof=1)) if len(test) > 1 else "-",
            ]
        )
    page.table(
        [
            "method",
            "chosen setting",
            "seeds",
            "versions",
            "gradient evaluations",
            "validation",
            "test [95 %]",
            "spread over seeds",
        ],
        rows,
    )


def provenance(page: Page, results: Results) -> None:
    runs = results.runs
    versions = ", ".join(f"`{value}`" for value in sorted(set(runs.version.astype(str))))
    commits = (
        ", ".join(f"`{value[:7]}`" for value in sorted(set(runs.commit.dropna().astype(str))))
        if "commit" in runs
        else ""
    )
    hours = page.number(runs.wall_seconds.sum() / 3600, ".1f") if "wall_seconds" in runs else "?"
    page.add(
        f"`persafl sweep {results.name}` ([sweeps/{results.name}.yaml](../../sweeps/{results.name}.yaml)): "
        f"{page.number(len(runs), 'd')} finished "
        f"trials, {hours} hours of training and evaluation in all, persafl_lit "
        f"{versions}{f' at {commits}' if commits else ''}; "
        f"[runs.csv]({results.name}/runs.csv), [curves.csv]({results.name}/curves.csv)."
    )


def progress(page: Page, results: Results) -> None:
    """Whether the sweep is complete: every trial of the first stage, and each method's best on the other seeds."""
    from persafl_lit.sweep.plan import plan_of
    from persafl_lit.sweep.trials import first_trials
    from persafl_lit.sweep.yaml_lines import Source

    path = SWEEPS / f"{results.name}.yaml"
    plan = plan_of(Source(path.name, path.read_text(encoding="utf-8")), results.name)
    first = first_trials(plan)
    planned = len(first) + (len({trial.method for trial in first}) * (len(plan.seeds) - 1) if plan.two_stages else 0)
    for row in results.failed.to_dict("records"):
        setting = ", ".join(
            f"{key.removesuffix('.name')} = {row[key] if isinstance(row[key], str) else page.number(row[key], 'g')}"
            for key in results.settings
            if not pd.isna(row[key])
        )
        page.add(
            f"Without a result: {NAMES[row['method']]} ({setting}), seed {page.number(row['seed'], 'd')}: it diverged."
            if "DivergenceError" in str(row["error"])
            else f"Without a result: {NAMES[row['method']]}, seed {page.number(row['seed'], 'd')}: it failed."
        )
    if len(results.runs) + len(results.failed) < planned:
        page.add(
            f"**Not complete: {page.number(len(results.runs), 'd')} of {page.number(planned, 'd')} trials so far.**"
        )


def equal_time(page: Page, results: Results) -> None:
    """(a) asynchronous against synchronous."""
    pairs = [pair for pair in PAIRS if set(pair) <= set(results.methods())]
    rows, verdicts = [], []
    for early, late in pairs:
        gap, rounds = page.difference(results.test(late), results.test(early)), results.chosen(early).versions.mean()
        rows.append([f"{NAMES[late]} - {NAMES[early]}", gap, page.number(rounds, ".0f")])
        verdicts.append(verdict(results.test(late), results.test(early)))
    yes = verdicts.count("better")
    page.add(
        f"{'Yes' if yes == len(pairs) else 'Not always' if yes else 'Not shown'}: in {page.number(yes, 'd')} "
        f"of {page.number(len(pairs), 'd')} pairs "
        "the asynchronous method is better and the interval of the difference excludes zero. The synchronous "
        "ones had few rounds by then; "
        "the next section gives them the time they need."
    )
    page.table(["difference in test accuracy", "mean [95 %, paired t]", "rounds that the synchronous one had"], rows)


def personalised(page: Page, results: Results) -> None:
    """(b) the personalised asynchronous methods against FedAsync, at equal time and at equal gradient evaluations."""
    base = results.test("fedasync")
    budget = results.chosen("fedasync").set_index("seed").grad_evals
    rows, said = [], []
    for method in ("persafl_maml", "persafl_me"):
        if method not in results.methods():
            continue
        within, beyond = results.around(method, "grad_evals", budget)
        ends = sorted((within, beyond), key=lambda values: values.mean())
        verdicts = {verdict(end, base) for end in ends}
        said.append(
            f"{NAMES[method]} is {verdict(results.test(method), base)} at equal time and "
            f"{verdicts.pop() if len(verdicts) == 1 else 'undecided'} at equal gradient evaluations"
        )
        rows.append(
            [
                NAMES[method],
                page.difference(results.test(method), base),
                *(page.difference(end, base) for end in (within, beyond)),
            ]
        )
    page.add(f"After the same fine-tuning, against FedAsync: {'; '.join(said)} (`undecided`: an interval holds zero).")
    page.table(
        ["against FedAsync", "at equal time", "with at most its gradient evaluations", "with at least as many"], rows
    )


def steadiness(page: Page, results: Results) -> None:
    """(c) spread over seeds, and over the last third of the curve."""
    rows, over = [], {}
    for method in ("fedasync", "persafl_maml", "persafl_me"):
        if method not in results.methods():
            continue
        chosen, spreads = results.chosen(method), []
        for trial in chosen.trial:
            curve = results.curve(trial)
            spreads.append(curve[curve.sim_time >= curve.sim_time.max() * 2 / 3].accuracy_test.std(ddof=1))
        over[method] = results.test(method).std(ddof=1), float(np.mean(spreads))
        over_seeds = page.number(results.test(method).std(ddof=1), ".4f") if len(chosen) > 1 else "one seed"
        rows.append([NAMES[method], over_seeds, page.number(float(np.mean(spreads)), ".4f")])
    if {"persafl_maml", "persafl_me"} <= set(over):
        steadier = [me < maml for me, maml in zip(over["persafl_me"], over["persafl_maml"], strict=True)]
        answer = {0: "No, by neither measure", 1: "By one measure only", 2: "Yes, by both measures"}[sum(steadier)]
        if np.isnan(over["persafl_me"] + over["persafl_maml"]).any():
            answer = "Not known yet"
        page.add(
            f"{answer}: standard deviation over seeds at the end, and over the last third of the curve. With "
            "so few seeds the first is rough."
        )
    page.table(["method", "standard deviation over seeds", "over the last third of the curve, mean over seeds"], rows)


def concurrency(page: Page, results: Results) -> None:
    """(d) share of active clients."""
    if "concurrency" not in results.runs:
        return
    share = {method: 100 * results.chosen(method).concurrency.mean() for method in results.methods()}
    late = [share[method] for _, method in PAIRS if method in share]
    early = [share[method] for method, _ in PAIRS if method in share]
    page.add(
        f"Under asynchrony {page.number(float(np.mean(late)), '.0f')} % of the clients are active on average, "
        f"in synchronous rounds {page.number(float(np.mean(early)), '.0f')} %."
    )
    rows = [[NAMES[method], page.number(value, ".0f") + " %"] for method, value in share.items()]
    page.table(["method", "clients that are active, on average"], rows)


def reached(results: Results, method: str, level: float) -> float | None:
    """First evaluation at which the mean over seeds of the chosen setting reaches a level."""
    chosen = results.chosen(method)
    mean = results.curves[results.curves.trial.isin(chosen.trial)].groupby("sim_time").accuracy_test.mean()
    late = mean[mean >= level]
    return None if late.empty else float(late.index[0])


# -- figures ----------------------------------------------------------------------------------------------------------


def figure(results: Results, path: Path, title: str) -> None:
    """Test accuracy of the chosen settings over simulated time and over gradient evaluations: mean, and the range of
    the seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

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
    shown.suptitle(title, fontsize=11)
    shown.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    plt.close(shown)


# -- sections ---------------------------------------------------------------------------------------------------------


def mnist(page: Page) -> None:
    results = load("paper_mnist")
    if results is None:
        return
    page.add("## MNIST: the paper's eight methods at equal communication time")
    provenance(page, results)
    page.add(
        "Settings are chosen by validation accuracy on the first seed, then run on the others. Test accuracy "
        "is the mean over clients after the same "
        "fine-tuning for every method; brackets are 95 % confidence intervals of the mean over seeds "
        "(Student's t), differences are paired by seed. "
        "`versions` is how often the shared model changed."
    )
    overview(page, results)
    page.add("![MNIST](figures/paper_mnist.png)")
    figure(
        results,
        HERE / "figures/paper_mnist.png",
        "MNIST, 30 clients with 5 of 10 classes each: mean and range over seeds",
    )

    page.add("### (a) Do asynchronous methods beat their synchronous counterparts at equal communication time?")
    equal_time(page, results)
    page.add("### (b) Do the personalised asynchronous methods beat FedAsync after the same fine-tuning?")
    personalised(page, results)
    page.add(
        "A MAML step costs four gradients and a Moreau step ten, so equal time is not equal work. The last "
        "two columns look at each method at "
        "the two evaluations around the moment at which it had computed as many gradients as FedAsync in its "
        "whole run; where the first of "
        "them is the untrained model, only the second says much."
    )
    page.add("### (c) Is ME more stable than MAML?")
    steadiness(page, results)
    page.add("### (d) How many clients are active?")
    concurrency(page, results)


def more_seeds(page: Page) -> None:
    """(b) again, with the settings that were chosen and more seeds."""
    results, more = load("paper_mnist"), load("seeds_mnist")
    if results is None or more is None:
        return
    page.add("## MNIST: FedAsync and the personalised methods on more seeds")
    provenance(page, more)
    fresh = {method: more.test(method) for method in ASYNCHRONOUS}
    tests = {method: pd.concat([results.test(method), fresh[method]]).sort_index() for method in ASYNCHRONOUS}
    base = tests["fedasync"]

    def words(method: str) -> str:
        every, new = verdict(tests[method], base), verdict(fresh[method], fresh["fedasync"])
        return f"{NAMES[method]} is {every} over all seeds and {new} over the new ones alone"

    page.add(
        "These seeds were added because the comparison above left (b) undecided, with the settings that it had chosen "
        "(on seed 0). A test over all seeds after such a look is too kind, so the new seeds also stand alone. Against "
        f"FedAsync, at equal time and after the same fine-tuning: {words('persafl_maml')}; {words('persafl_me')}."
    )
    page.table(
        ["method", "seeds", "test [95 %]", "spread", "worst seed", "minus FedAsync, all", "minus FedAsync, new seeds"],
        [
            [
                NAMES[method],
                page.number(len(test), "d"),
                page.mean(test),
                page.number(test.std(ddof=1)),
                page.number(test.min()),
                "-" if method == "fedasync" else page.difference(test, base),
                "-" if method == "fedasync" else page.difference(fresh[method], fresh["fedasync"]),
            ]
            for method, test in tests.items()
        ],
    )


def robustness(page: Page) -> None:
    """One factor at a time around the paper's setting."""
    results = load("robustness_mnist")
    if results is None:
        return
    page.add("## MNIST: one factor at a time")
    provenance(page, results)
    progress(page, results)
    runs = results.runs
    keys = [key for key in runs if key.split(".")[0] in ("data", "delays", "schedule")]
    usual = {key: runs[key].mode(dropna=False)[0] for key in keys}

    def shown(value: float | str) -> str:
        return value if isinstance(value, str) else page.number(value, "g")

    factors = [
        ", ".join(
            f"{key.removesuffix('.name')} = {shown(row[key])}"
            for key in keys
            if not pd.isna(row[key]) and row[key] != usual[key]
        )
        for _, row in runs.iterrows()
    ]
    runs = runs.assign(factor=factors)
    methods = [method for method in NAMES if method in set(runs.method)]

    def cell(factor: str, method: str) -> str:
        tests = runs[(runs.factor == factor) & (runs.method == method)].set_index("seed").accuracy_test
        return page.mean(tests) if len(tests) else "-"

    page.add("Test accuracy after the same fine-tuning, mean over seeds; the first row is the paper's setting.")
    page.table(
        ["what is different", *(NAMES[method] for method in methods)],
        [
            [factor or "nothing", *(cell(factor, method) for method in methods)]
            for factor in dict.fromkeys(["", *factors])
        ],
    )
    budgets = {
        "no fine-tuning": "beside_none_test",
        "one step": "beside_sgd-1_test",
        "ten steps": "accuracy_test",
        "fifty steps": "beside_sgd-50_test",
    }
    base = runs[runs.factor == ""]
    page.add("Budgets of fine-tuning, in the paper's setting:")
    page.table(
        ["budget", *(NAMES[method] for method in methods)],
        [
            [name, *(page.mean(base[base.method == method].set_index("seed")[column]) for method in methods)]
            for name, column in budgets.items()
        ],
    )


def synchronous(page: Page) -> None:
    results, reference = load("synchronous_mnist"), load("paper_mnist")
    if results is None or reference is None:
        return
    page.add("## MNIST: the synchronous methods given the time they need")
    provenance(page, results)
    progress(page, results)
    overview(page, results)
    page.add("![MNIST, synchronous](figures/synchronous_mnist.png)")
    figure(
        results,
        HERE / "figures/synchronous_mnist.png",
        "MNIST, synchronous methods until they flatten: mean and range over seeds",
    )
    rows = []
    end = float(reference.runs.sim_time.max())
    for early, late in PAIRS:
        if early in results.methods() and late in reference.methods():
            level = reference.test(late).mean()
            time = reached(results, early, level)
            rows.append(
                [
                    (
                        f"{NAMES[early]} reaches {page.number(level)}, which {NAMES[late]} has at time "
                        f"{page.number(end, 'g')}"
                    ),
                    "not reached" if time is None else f"by time {page.number(time, 'g')}",
                ]
            )
    page.table(["level", "first evaluation at which the mean over seeds is there"], rows)
    fedavg = results.runs[(results.runs.method == "fedavg") & (results.runs.seed == results.runs.seed.min())]
    if "schedule.cohort" in fedavg:
        step = "method.beta" if "method.beta" in fedavg else "method"
        cells = fedavg.pivot_table(index="schedule.cohort", columns=step, values="accuracy_test")
        page.add("FedAvg on the first seed, final test accuracy by cohort, for each server step that has finished:")
        rows = [
            [page.number(cohort, "g"), *(page.number(value) for value in row)]
            for cohort, row in zip(cells.index, cells.to_numpy(), strict=True)
        ]
        names = [
            f"server step {page.number(beta, 'g')}" if step == "method.beta" else "the smallest server step"
            for beta in cells
        ]
        page.table(["cohort", *names], rows)


def beside(page: Page) -> None:
    results = load("more_mnist")
    if results is None:
        return
    page.add("## MNIST: buffered updates, and every client alone")
    provenance(page, results)
    overview(page, results)
    page.add(
        "FedBuff's server steps were chosen from a wider range than those of the asynchronous methods above, which "
        "have the paper's: this is no comparison on equal terms with them."
    )


def cifar(page: Page) -> None:
    looks, results = load("cifar10_look"), load("cifar10_server_step")
    if looks is None:
        return
    page.add("## CIFAR-10: why FedAsync does not learn there, and what it takes")
    page.add(
        "The paper's setting (thirty clients with three classes each, server steps of about one) fails under "
        "FedAsync, so short runs came first: one "
        "seed, one thing changed at a time ([runs.csv](cifar10_look/runs.csv), [curves.csv](cifar10_look/curves.csv))."
    )
    rows = []
    named = looks.runs.rename(columns=lambda column: column.replace(".", "_"))
    for row in named.sort_values(["clients", "staleness_mean", "accuracy_test"]).itertuples():
        alone = row.clients == 1
        held = (
            "all data, one client, no fine-tuning"
            if alone
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
        "Heterogeneity is not the cause: without staleness three classes per client train well, and with "
        "staleness even identically "
        "distributed clients do not. A likely reason: a stale update is a gradient step with a delay of as "
        "many updates, each of several local "
        "steps, and such steps are stable only while step size times curvature times delay stays small; a "
        "deep network leaves that "
        "range at once (He's initialisation) or after its first plateau (PyTorch's). In these runs a smaller "
        "server step helps, "
        "and the Moreau envelope does, too."
    )
    if results is None:
        return
    provenance(page, results)
    progress(page, results)
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


def published(page: Page) -> None:
    path = HERE / "pfedme_mnist/readings.csv"
    if not path.exists():
        return
    readings = pd.read_csv(path)
    table = pd.read_csv(HERE / "pfedme_mnist/published.csv")
    page.add("## Against published numbers: pFedMe's Table 1, MNIST, logistic regression")
    page.add(
        "".join(
            f"Published ({row.source}): {row.model} {page.number(row.accuracy, '.4f')}. " for row in table.itertuples()
        ).strip()
    )
    page.add(
        "[study.py](pfedme_mnist/study.py) is a numpy loop of its own, so that readings of the paper can be "
        "tried that this package refuses. "
        "`reset`: the inner problem starts at the local model in every local step, as the paper's algorithm "
        "says; `carried`: where the step "
        "before ended, as the published code does. `local` is the client's local model after its local "
        "steps: what the published code "
        "evaluates as personalised, because its list of personalised parameters is an alias of the live "
        "model. Step sizes: `same` as for the "
        "paper's curves, `tuned` as for its table. `disjoint`: no sample belongs to two clients; `shared`: "
        "as the published generator deals the samples: its position within a label is a boolean by mistake, so every "
        "client's piece of a label starts at the label's first sample, and what one client is tested on is among the "
        "training data of others. Mean over seeds:"
    )
    columns = ["global", "theta_w", "local", "theta_R", "best_global", "best_local"]
    groups = readings.groupby(["samples", "pixels", "start", "steps"], sort=False)
    means = groups[columns].mean()
    rows = [
        [*index, page.number(count, "d"), *(page.number(value, ".4f") for value in row)]
        for index, count, row in zip(means.index, groups.size(), means.to_numpy(), strict=True)
    ]
    names = ["shared w", "theta(w), K steps", "local model w_R", "last theta", "best shared w", "best local model"]
    page.table(["samples", "pixels", "inner start", "step sizes", "seeds", *names], rows)
    published = table.set_index("model").accuracy
    target = {"best_global": published["pFedMe, global"], "best_local": published["pFedMe, personalised"]}
    fedavg = means.xs("fedavg", level="start")
    means = means.drop("fedavg", level="start")
    gaps = sum((means[name] - value).abs() for name, value in target.items())
    nearest = gaps.idxmin()
    off = [page.number(means.loc[nearest, name] - value, "+.4f") for name, value in target.items()]
    page.add(
        "Nearest to the published pair (shared, and personalised as the code evaluates it, each at its best "
        "evaluation, as the published scripts "
        f"summarise): samples `{nearest[0]}`, pixels `{nearest[1]}`, inner start `{nearest[2]}`, step sizes "
        f"`{nearest[3]}`; the differences are {' and '.join(off)}. "
        + (
            "This reproduces the table."
            if gaps[nearest] < CLOSE
            else "None of these readings reproduces the table yet."
        )
    )
    if nearest[0] == "shared" and ("disjoint", *nearest[1:]) in means.index:
        apart = means.loc[("disjoint", *nearest[1:])]
        leaks = [page.number(means.loc[nearest, name] - apart[name], "+.4f") for name in target]
        page.add(
            f"The same reading with disjoint clients: the samples that clients share are worth {' and '.join(leaks)} "
            "of the published pair. It measures, in part, samples that were trained on elsewhere."
        )
    if not fedavg.empty:
        best = fedavg.best_global.groupby(level="samples").max()
        found = ", ".join(f"{page.number(value, '.4f')} with {samples} samples" for samples, value in best.items())
        page.add(
            f"FedAvg at its best evaluation, the better of two step sizes: {found}; published "
            f"{page.number(published['FedAvg'], '.4f')}."
        )


def headline(page: Page) -> str:
    """The figure and the sentence at the top of the repository's README."""
    results = load("paper_mnist")
    assert results is not None
    base, budget = results.test("fedasync"), results.chosen("fedasync").set_index("seed").grad_evals
    early = [results.test(pair[0]).mean() for pair in PAIRS]
    better = all(verdict(results.test(late), results.test(first)) == "better" for first, late in PAIRS)
    ahead = "are ahead of" if better else "are not all ahead of"
    tests = ", ".join(f"{NAMES[pair[1]]} {page.number(results.test(pair[1]).mean())}" for pair in PAIRS)
    pair = ("persafl_maml", "persafl_me")
    decided = all(verdict(results.test(method), base) == "better" for method in pair)
    over = (
        "and the personalised two are better than FedAsync"
        if decided
        else "while these seeds do not decide between FedAsync and the personalised two"
    )
    below = sum(results.around(method, "grad_evals", budget)[1].mean() < base.mean() for method in pair)
    work = (
        "both of those are above it in the mean",
        "one of those is below it in the mean",
        "those are below it in the mean",
    )[below]
    return (
        "![accuracy over time and over gradient evaluations](docs/results/figures/paper_mnist.png)\n\n"
        f"The paper's comparison on MNIST, rerun on {page.number(len(base), 'd')} seeds: at equal "
        "communication time the "
        f"asynchronous methods ({tests}) {ahead} the synchronous ones (at most {page.number(max(early))}), {over}; "
        f"at equal gradient evaluations {work}.{_more_seeds_sentence(page)} Everything, also what fails: "
        "[docs/results](docs/results/README.md)."
    )


def _more_seeds_sentence(page: Page) -> str:
    """What the seeds that were added say, alone."""
    more = load("seeds_mnist")
    if more is None:
        return ""
    base = more.test("fedasync")
    said = " and ".join(
        f"{NAMES[method]} {page.difference(more.test(method), base)}" for method in ASYNCHRONOUS if method != "fedasync"
    )
    return f" On {page.number(len(base), 'd')} further seeds the difference to FedAsync at equal time is: {said}."


def with_headline(readme: str, text: str) -> str:
    """The README with its block of results replaced."""
    before, _, rest = readme.partition("<!-- results: made by `make results` -->\n")
    _, _, after = rest.partition("<!-- end of results -->\n")
    return f"{before}<!-- results: made by `make results` -->\n{text}\n<!-- end of results -->\n{after}"


SECTIONS: tuple[Callable[[Page], None], ...] = (mnist, more_seeds, synchronous, beside, robustness, cifar, published)


def render() -> Page:
    """The whole page; figures are written on the way."""
    (HERE / "figures").mkdir(exist_ok=True)
    page = Page()
    page.add(
        "# Results",
        "Made by `make results` from the CSV files in the folders beside this page; no number is typed by hand. "
        "A claim that fails is reported as failing.",
    )
    for section in SECTIONS:
        section(page)
    return page


if __name__ == "__main__":
    (HERE / "README.md").write_text(render().text(), encoding="utf-8")
    front = HERE.parents[1] / "README.md"
    front.write_text(with_headline(front.read_text(encoding="utf-8"), headline(Page())), encoding="utf-8")
