"""The paper's four questions, asked of one sweep."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rendering.exported import NAMES, PAIRS, Results
from rendering.page import Page, verdict

QUESTIONS = (
    "(a) Do asynchronous methods beat their synchronous counterparts at equal communication time?",
    "(b) Do the personalised asynchronous methods beat FedAsync after the same fine-tuning?",
    "(c) Is ME more stable than MAML?",
    "(d) How many clients are active?",
)


def answers(page: Page, results: Results) -> list[str]:
    """Each question with its answer and table; returns the answers in short."""
    short = []
    for question, answer in zip(QUESTIONS, (equal_time, personalised, steadiness, concurrency), strict=True):
        page.add(f"### {question}")
        short.append(answer(page, results))
    return short


def summary(page: Page, columns: Mapping[str, Results]) -> None:
    """The short answers of several sweeps side by side."""
    told = [answers(Page(numbers=page.numbers), results) for results in columns.values()]
    page.table(
        ["question", *columns],
        [[question, *(short[number] for short in told)] for number, question in enumerate(QUESTIONS)],
    )


def equal_time(page: Page, results: Results) -> str:
    """(a) asynchronous against synchronous."""
    pairs = [pair for pair in PAIRS if set(pair) <= set(results.methods())]
    rows, verdicts = [], []
    for early, late in pairs:
        gap, rounds = page.difference(results.test(late), results.test(early)), results.chosen(early).versions.mean()
        rows.append([f"{NAMES[late]} - {NAMES[early]}", gap, page.number(rounds, ".0f")])
        verdicts.append(verdict(results.test(late), results.test(early)))
    yes, no = verdicts.count("better"), verdicts.count("worse")
    worse = f", in {page.number(no, 'd')} worse" if no else ""
    answer = "Yes" if yes == len(pairs) else "Not always" if yes else "No" if no == len(pairs) else "Not shown"
    counted = f"in {page.number(yes, 'd')} of {page.number(len(pairs), 'd')} pairs"
    single = [page.number(verdicts.count(f"{where} on one seed"), "d") for where in ("ahead", "behind")]
    if single != ["0", "0"]:
        worse += f", on one seed ahead in {single[0]} and behind in {single[1]}"
    page.add(
        f"{answer}: {counted} the asynchronous method is better and the "
        f"interval of the difference excludes zero{worse}. The "
        "synchronous ones had few rounds by then; a section below gives them more time."
    )
    page.table(["difference in test accuracy", "mean [95 %, paired t]", "rounds that the synchronous one had"], rows)
    return f"{answer}: better {counted}{worse}"


def personalised(page: Page, results: Results) -> str:
    """(b) the personalised asynchronous methods against FedAsync, at equal time and at equal gradient evaluations."""
    base = results.test("fedasync")
    budget = results.chosen("fedasync").set_index("seed").grad_evals
    rows, said = [], []
    for method in ("persafl_maml", "persafl_me"):
        if method not in results.methods():
            said.append(f"{NAMES[method]} has no result here")
            continue
        within, beyond = results.around(method, "grad_evals", budget)
        verdicts = {verdict(end, base) for end in (within, beyond)}
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
    page.add(
        "A MAML step costs four gradients and a Moreau step ten, so equal time is not equal work. The last two columns "
        "look at each method at the two evaluations around the moment at which it had computed as many gradients as "
        "FedAsync in its whole run; where the first of them is the untrained model, only the second says much."
    )
    return "; ".join(said)


def steadiness(page: Page, results: Results) -> str:
    """(c) spread over seeds, and over the last third of the curve."""
    rows, over = [], {}
    for method in ("fedasync", "persafl_maml", "persafl_me"):
        if method not in results.methods():
            continue
        chosen, spreads, points = results.chosen(method), [], 0
        for trial in chosen.trial:
            curve = results.curve(trial)
            last = curve[curve.sim_time >= curve.sim_time.max() * 2 / 3].accuracy_test
            spreads.append(last.std(ddof=1))
            points = len(last)
        over[method] = results.test(method).std(ddof=1), float(np.mean(spreads))
        over_seeds = page.number(over[method][0], ".4f") if len(chosen) > 1 else "one seed"
        rows.append([NAMES[method], over_seeds, page.number(over[method][1], ".4f"), page.number(points, "d")])
    if {"persafl_maml", "persafl_me"} <= set(over):
        steadier = [me < maml for me, maml in zip(over["persafl_me"], over["persafl_maml"], strict=True)]
        answer = {0: "No, by neither measure", 1: "By one measure only", 2: "Yes, by both measures"}[sum(steadier)]
        if np.isnan(over["persafl_me"] + over["persafl_maml"]).any():
            answer = "Not known with one seed"
    else:
        answer = "Not known: one of them has no result"
    page.add(
        f"{answer}: standard deviation over seeds at the end, and over the last third of the curve. With so few seeds "
        "the first is rough."
    )
    third = "over the last third of the curve, mean over seeds"
    page.table(["method", "standard deviation over seeds", third, "evaluations in it"], rows)
    return answer


def concurrency(page: Page, results: Results) -> str:
    """(d) share of active clients."""
    share = {method: 100 * results.chosen(method).concurrency.mean() for method in results.methods()}
    late = [share[method] for _, method in PAIRS if method in share]
    early = [share[method] for method, _ in PAIRS if method in share]
    active, waiting = (page.number(float(np.mean(values)), ".0f") for values in (late, early))
    page.add(f"Under asynchrony {active} % of the clients are active on average, in synchronous rounds {waiting} %.")
    rows = [[NAMES[method], page.number(value, ".0f") + " %"] for method, value in share.items()]
    page.table(["method", "clients that are active, on average"], rows)
    return f"{active} % against {waiting} %"
