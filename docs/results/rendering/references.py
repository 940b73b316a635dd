"""Do the settings of MNIST and Fashion-MNIST learn at all?"""

from __future__ import annotations

from rendering.exported import NAMES, load
from rendering.page import Page
from rendering.sweeps import provenance

LEARNS = 0.05
"""The gain over the fine-tuned untrained model from which a setting counts as learning."""
DATA = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}


def references(page: Page) -> None:
    """All data at one client, and four methods on Fashion-MNIST."""
    alone, fashion, mnist = load("references"), load("fashion_mnist"), load("paper_mnist")
    if alone is None or fashion is None or mnist is None:
        return
    page.add("## MNIST and Fashion-MNIST: does the setting learn?")
    page.add(
        "All data at one client, with the paper's network and step size: no staleness, no other clients, no "
        "fine-tuning. What a shared model can reach."
    )
    provenance(page, alone)
    page.table(
        ["data", "updates", "gradient evaluations", "test accuracy of the one model"],
        [
            [
                DATA[row["data.name"]],
                page.number(row["updates"], "d"),
                page.number(row["grad_evals"], ",d"),
                page.number(row["accuracy_test"]),
            ]
            for row in alone.runs.to_dict("records")
        ],
    )
    page.add(
        "Fashion-MNIST, which the paper does not have, in its setting for MNIST: four methods with the settings of "
        "the section before, one seed."
    )
    provenance(page, fashion)
    page.table(
        ["method", "versions", "gradient evaluations", "untrained, fine-tuned", "test accuracy after fine-tuning"],
        [
            [
                NAMES[row["method"]],
                page.number(row["versions"], "d"),
                page.number(row["grad_evals"], ",d"),
                page.number(fashion.curve(row["trial"]).accuracy_test.iloc[0]),
                page.number(row["accuracy_test"]),
            ]
            for row in sorted(fashion.runs.to_dict("records"), key=lambda row: list(NAMES).index(row["method"]))
        ],
    )
    gains = [row.accuracy_test - fashion.curve(row.trial).accuracy_test.iloc[0] for row in fashion.runs.itertuples()]
    page.add(
        f"{'The setting learns' if min(gains) > LEARNS else 'The setting does not learn for every method'}: against "
        f"fine-tuning the untrained model the methods gain {page.number(min(gains))} to {page.number(max(gains))}."
    )
