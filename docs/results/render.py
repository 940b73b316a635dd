"""Render docs/results/README.md, its figures, and the results on top of the repository's README: `make results`.

No number of the page is typed by hand: each goes through `Page.number`, and a test renders the page again and compares.
"""

from __future__ import annotations

from collections.abc import Callable

from rendering import cifar10, mnist, personalised, pfedme
from rendering.exported import ASYNCHRONOUS, HERE, NAMES, PAIRS, load
from rendering.page import Page, verdict
from rendering.questions import summary
from rendering.references import references

SECTIONS: tuple[Callable[[Page], None], ...] = (
    mnist.comparison,
    mnist.more_seeds,
    mnist.synchronous,
    mnist.beside,
    mnist.robustness,
    references,
    cifar10.look,
    cifar10.comparison,
    cifar10.server_step,
    cifar10.synchronous,
    pfedme.published,
    pfedme.hidden_layer,
    personalised.digits,
    personalised.mnist,
    personalised.parity,
)

ASKED = {
    "paper_mnist": "MNIST",
    "paper_cifar10_short": "CIFAR-10, the paper's grids",
    "cifar10_server_step": "CIFAR-10, smaller server steps allowed",
}
"""The sweeps that are asked the paper's four questions."""


def render() -> Page:
    """The whole page; figures are written on the way."""
    page = Page()
    page.add(
        "# Results",
        "Made by `make results` from the CSV files in the folders beside this page; no number is typed by hand. "
        "A claim that fails is reported as failing.",
    )
    swept = {title: load(name) for name, title in ASKED.items()}
    summary(page, {title: results for title, results in swept.items() if results is not None})
    page.add("For (b) there are more seeds on MNIST in a section of their own.")
    for section in SECTIONS:
        section(page)
    return page


def headline(page: Page) -> str:
    """The figure and the sentences at the top of the repository's README."""
    results, more = load("paper_mnist"), load("seeds_mnist")
    assert results is not None
    assert more is not None
    base, budget = results.test("fedasync"), results.chosen("fedasync").set_index("seed").grad_evals
    early = max(results.test(first).mean() for first, _ in PAIRS)
    better = all(verdict(results.test(late), results.test(first)) == "better" for first, late in PAIRS)
    tests = ", ".join(f"{NAMES[late]} {page.number(results.test(late).mean())}" for late in ASYNCHRONOUS)
    personal = [method for method in ASYNCHRONOUS if method != "fedasync"]
    decided = all(verdict(results.test(method), base) == "better" for method in personal)
    below = sum(results.around(method, "grad_evals", budget)[1].mean() < base.mean() for method in personal)
    work = ("both of those are above it", "one of those is below it", "those are below it")[below]
    fresh = more.test("fedasync")
    gaps = " and ".join(f"{NAMES[method]} {page.difference(more.test(method), fresh)}" for method in personal)
    return (
        "![accuracy over time and over gradient evaluations](docs/results/figures/paper_mnist.png)\n\n"
        f"The paper's comparison on MNIST, rerun on {page.number(len(base), 'd')} seeds: at equal communication time "
        f"the asynchronous methods ({tests}) {'are' if better else 'are not all'} ahead of the synchronous ones (at "
        f"most {page.number(early)}), "
        + (
            "and the personalised two are better than FedAsync"
            if decided
            else "while these seeds do not decide between FedAsync and the personalised two"
        )
        + f"; at equal gradient evaluations {work} in the mean. On {page.number(len(fresh), 'd')} further seeds the "
        f"difference to FedAsync at equal time is: {gaps}. {_cifar10(page)} Everything, also what fails: "
        "[docs/results](docs/results/README.md)."
    )


def _cifar10(page: Page) -> str:
    """What becomes of FedAsync on CIFAR-10 with the paper's server step, and with a smaller one."""
    results = load("cifar10_server_step")
    assert results is not None
    runs = results.runs[(results.runs.method == "fedasync") & (results.runs.seed == results.runs.seed.min())]
    by_step = runs.set_index("method.beta").accuracy_test
    told = " and ".join(f"{page.number(by_step[step])} with {page.number(step, 'g')}" for step in (1.0, 0.2))
    return f"On CIFAR-10 the server step decides: FedAsync has {told} (one seed, equal time)."


def with_headline(readme: str, text: str) -> str:
    """The README with its block of results replaced."""
    before, _, rest = readme.partition("<!-- results: made by `make results` -->\n")
    _, _, after = rest.partition("<!-- end of results -->\n")
    return f"{before}<!-- results: made by `make results` -->\n{text}\n<!-- end of results -->\n{after}"


if __name__ == "__main__":
    (HERE / "README.md").write_text(render().text(), encoding="utf-8")
    front = HERE.parents[1] / "README.md"
    front.write_text(with_headline(front.read_text(encoding="utf-8"), headline(Page())), encoding="utf-8")
