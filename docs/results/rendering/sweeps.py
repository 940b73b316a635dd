"""What any sweep's section begins with: where it comes from, how much of it there is, and the chosen settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pandas as pd

from persafl_lit.sweep.plan import Plan, plan_of
from persafl_lit.sweep.trials import Trial, first_trials
from persafl_lit.sweep.yaml_lines import Source
from rendering.exported import NAMES, SWEEPS, Results
from rendering.page import Page

Naming = Callable[[pd.Series], dict[str, str | float]]


def provenance(page: Page, results: Results, naming: Naming | None = None) -> None:
    """Command, versions, hours and files; trials without a result, named by `naming`; and whether any are missing."""
    runs = results.runs
    versions = ", ".join(f"`{value}`" for value in sorted(set(runs.version.astype(str))))
    commits = ", ".join(f"`{value[:7]}`" for value in sorted(set(runs.commit.dropna().astype(str))))
    page.add(
        f"`persafl sweep {results.name}` ([sweeps/{results.name}.yaml](../../sweeps/{results.name}.yaml)): "
        f"{page.number(len(runs), 'd')} finished trials, {page.number(runs.wall_seconds.sum() / 3600, '.1f')} hours of "
        f"training and evaluation in all, persafl_lit {versions} at {commits}; "
        f"[runs.csv]({results.name}/runs.csv), [curves.csv]({results.name}/curves.csv)."
    )
    _failures(page, results, naming or results.varied)
    plan = _plan(results.name)
    first = first_trials(plan)
    second = len({trial.method for trial in first}) * (len(plan.seeds) - 1) if plan.two_stages else 0
    if len(runs) + len(results.failed) < len(first) + second:
        of, done = page.number(len(first) + second, "d"), {*runs.trial, *results.failed.trial}
        missing = Counter(trial.method for trial in first if trial.hash not in done)
        every = Counter(trial.method for trial in first)
        lacking = ", ".join(
            f"{NAMES[method]} {page.number(count, 'd')} of {page.number(every[method], 'd')}"
            for method, count in missing.items()
        )
        page.add(
            f"**Not complete: {page.number(len(runs) + len(results.failed), 'd')} of {of} trials so far.** "
            + (f"Settings not run on the first seed: {lacking}." if lacking else "The rest is missing on other seeds.")
        )


def _plan(name: str) -> Plan:
    path = SWEEPS / f"{name}.yaml"
    return plan_of(Source(path.name, path.read_text(encoding="utf-8")), name)


def planned(name: str) -> list[Trial]:
    """The trials of a sweep; of two stages, those of the first."""
    return first_trials(_plan(name))


def _failures(page: Page, results: Results, naming: Naming) -> None:
    """One sentence for the trials that diverged, one for those that failed otherwise."""
    for diverged, reason in ((True, "the run diverged"), (False, "the run failed")):
        found: dict[tuple[str, str], list[int]] = {}
        for _, row in results.failed.sort_values(["method", "seed"]).iterrows():
            if ("DivergenceError" in str(row["error"])) == diverged:
                found.setdefault((NAMES[row["method"]], page.setting(naming(row))), []).append(row["seed"])
        if found:
            said = "; ".join(
                f"{method}{f' with {setting}' if setting else ''} "
                f"(seed{'s' if len(seeds) > 1 else ''} {', '.join(page.number(seed, 'd') for seed in seeds)})"
                for (method, setting), seeds in found.items()
            )
            page.add(f"Without a result, because {reason}: {said}.")


def overview(page: Page, results: Results) -> None:
    """One row per method: its chosen setting, and what that gave."""
    rows = []
    for method in results.methods():
        chosen = results.chosen(method)
        test = results.test(method)
        rows.append(
            [
                NAMES[method],
                page.setting(results.setting(method)) or "-",
                page.number(len(chosen), "d"),
                page.number(chosen.versions.mean(), ",.0f"),
                page.number(chosen.grad_evals.mean(), ",.0f"),
                page.number(chosen.accuracy_val.mean()),
                page.mean(test),
                page.number(test.std(ddof=1)) if len(test) > 1 else "-",
            ]
        )
    names = ["method", "chosen setting", "seeds", "versions", "gradient evaluations", "validation", "test [95 %]"]
    page.table([*names, "spread over seeds"], rows)
