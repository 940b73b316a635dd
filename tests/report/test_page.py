"""The report's page in a real browser without a network, on a screen and on a phone. With SCREENSHOTS=folder it leaves pictures there."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from persafl_lit.report import write_report
from persafl_lit.timeline.timeline import jobs_to_timeline
from tests.support.browser import OFFLINE, Browser, needs_chromium
from tests.support.records import record

SCREEN, PHONE = 1280, 400
SPEED = {"persafl_me": 0.7, "persafl_maml": 0.6, "fedasync": 0.5, "scaffold": 0.25, "fedavg": 0.2}
PLOTS = 13  # over time, concurrency, clients, staleness; three keys (curves and sensitivity) and their three pairs
DRAWN = "[...document.querySelectorAll('div.plot')].filter(plot => plot.querySelector('.main-svg .trace, .main-svg .hm')).length"

pytestmark = needs_chromium


def visits(clients, count, late, rounds):
    """Clients come in turn, one a second. In rounds all read at the same time; else each reads at most `late` updates before its own arrives."""
    arrives = 1.0 + np.arange(count)
    reads = (
        np.arange(count) // clients * clients
        if rounds
        else np.maximum(0, np.arange(count) - 1 - np.arange(count) % late)
    )
    read_at = np.where(reads > 0, arrives[np.maximum(reads - 1, 0)], 0.0)
    return jobs_to_timeline(clients, np.arange(count) % clients, reads, read_at, arrives, float(count))


def climbing(method, seed, gain, **config):
    """A run whose accuracy goes from 0.1 towards 0.1 + gain, with clients that profit from their arrivals."""
    times = list(range(0, 41, 4))
    test = [0.1 + (gain + 0.02 * seed) * (1 - 0.9 ** (time / 2)) for time in times]
    run = record(method, seed, val=[score - 0.01 for score in test], test=test, times=times, **config)
    rounds = method in ("fedavg", "scaffold")
    arrivals = [3 + (7 * client + seed) % 9 for client in range(12)]
    clients = [
        {"client": client, "arrivals": come, "test_accuracy": gain + 0.02 * come + 0.01 * seed}
        for client, come in enumerate(arrivals)
    ]
    curves = run.curves | {
        "accuracy.worst_decile": [0.7 * score for score in test],
        "accuracy.global": [0.8 * score for score in test],
    }
    curves["grad_evals"] = [100.0 * time for time in times]
    run.config.update({"schedule.name": "rounds" if rounds else "asynchronous", "method.buffer": 12 if rounds else 1})
    late = 9 if method == "persafl_me" else 4
    return replace(run, curves=curves, clients=clients, timeline=visits(12, 48, late, rounds), bytes_communicated=3e6)


def some_of_everything():
    """A sweep in two stages of five methods, three keys of one of them varied, and what went wrong with two runs."""
    grid = {"method__lam": 20, "method__beta": 1.0, "schedule__tau": 10}
    runs = [
        climbing(method, seed, gain, **(grid if method == "persafl_me" else {}))
        for method, gain in SPEED.items()
        for seed in (0, 1, 2)
    ]
    others = [
        (lam, beta, tau)
        for lam in (20, 25, 30)
        for beta in (0.8, 1.0, 1.2)
        for tau in (5, 10)
        if (lam, beta, tau) != (20, 1.0, 10)
    ]
    runs += [
        climbing(
            "persafl_me",
            0,
            0.69 - 0.02 * (lam / 20 + beta - 2) - 0.001 * tau,
            method__lam=lam,
            method__beta=beta,
            schedule__tau=tau,
        )
        for lam, beta, tau in others
    ]
    failed = record(
        "fedprox",
        status="FAILED",
        error="DivergenceError: update 3 of client 4 holds values that are not finite; lower eta or set clip",
    )
    return [replace(run, planned=50) for run in (*runs, failed, record("fedprox", seed=1, status="RUNNING"))]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(some_of_everything(), "every method on digits", folder)
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser"), OFFLINE) as browser:
        yield browser


def show(browser, page, width):
    browser.open(page, width, 900)
    browser.wait_until(DRAWN, PLOTS)
    assert browser.evaluate("document.querySelectorAll('div.plot').length") == PLOTS


def picture(browser, name, width):
    """Of the whole page: the window is made as high as it is."""
    if folder := os.environ.get("SCREENSHOTS"):
        height = browser.evaluate("document.documentElement.scrollHeight")
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(folder) / f"{name}.png")


def middle_of(browser, selector):
    """In the window, where the element is scrolled to."""
    found = f"document.querySelector({json.dumps(selector)})"
    browser.evaluate(f"{found}.scrollIntoView({{block: 'center'}})")
    return browser.evaluate(
        f"(box => [box.x + box.width / 2, box.y + box.height / 2])({found}.getBoundingClientRect())"
    )


def mouse(browser, kind, x, y):
    browser.call(
        "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" else "left", clickCount=1
    )


@pytest.mark.parametrize("width", [SCREEN, PHONE])
def test_the_page_opens_without_a_network_at_any_width(browser, page, width):
    show(browser, page, width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    assert (
        browser.evaluate("performance.getEntriesByType('resource').filter(r => !/^(data|blob):/.test(r.name)).length")
        == 0
    )
    assert browser.evaluate("[...document.images].filter(image => !image.naturalWidth).length") == 0
    assert browser.complaints == []
    picture(browser, f"report_{width}", width)


@pytest.mark.parametrize("width", [SCREEN, PHONE])
def test_a_click_on_a_name_hides_a_method_and_another_shows_it(browser, page, width):
    show(browser, page, width)
    shown = (
        "document.getElementById('plot-accuracy').data.filter(t => t.name == 'persafl_me').map(t => t.visible ?? true)"
    )
    for wanted in ("legendonly", True):
        x, y = middle_of(browser, "#plot-accuracy .legendtoggle")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            mouse(browser, kind, x, y)
        browser.wait_until(shown, [wanted], seconds=20)
    assert browser.complaints == []


def test_the_keyboard_switches_what_scores_are_drawn_against(browser, page):
    show(browser, page, SCREEN)
    plotted = "document.getElementById('plot-accuracy')"
    x, y = middle_of(browser, "#plot-accuracy .legendtoggle")
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        mouse(browser, kind, x, y)
    hidden = f"{plotted}._fullData.filter(trace => trace.visible == 'legendonly' && trace.showlegend).map(trace => trace.name)"
    browser.wait_until(hidden, ["persafl_me"], seconds=20)
    browser.evaluate("document.querySelector('.switch input').focus()")
    seen = []
    for wanted, last in {
        "server updates": 400,
        "gradient evaluations": 4000,
        "bytes communicated": 3e6,
        "simulated time": 40,
    }.items():
        for kind in ("keyDown", "keyUp"):
            browser.call(
                "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
            )
        browser.wait_until(f"{plotted}.layout.xaxis.title.text", wanted, seconds=20)
        assert browser.evaluate(f"{plotted}.data.at(-1).x.at(-1)") == last
        assert browser.evaluate(f"{plotted}.querySelector('.xtitle').textContent") == wanted
        seen.append(
            browser.evaluate("document.querySelector('.switch').closest('figure').querySelector('h3').textContent")
        )
        assert browser.evaluate(hidden) == ["persafl_me"], "what was hidden stays hidden"
        picture(browser, f"axis_{wanted.split()[-1]}", SCREEN)
    assert seen[0] == "Personalised performance over server updates"
    assert browser.evaluate("document.querySelectorAll('.switch input:focus-visible').length") == 1, (
        "one sees where the keyboard is"
    )
    assert browser.complaints == []


def test_pointing_at_a_mark_tells_its_values(browser, page):
    show(browser, page, SCREEN)
    mouse(browser, "mouseMoved", *middle_of(browser, "#plot-accuracy .scatterlayer .points path:last-child"))
    # persafl_me's last mark: 0.1 + (0.7, 0.72, 0.74) (1 - 0.9^20) has the mean 0.1 + 0.72 * 0.87842 = 0.732 and deviation 0.02 * 0.87842
    browser.wait_until(
        "document.querySelector('#plot-accuracy .hovertext')?.textContent", "persafl_metime 400.732 ± 0.018", seconds=20
    )


def test_the_method_stays_in_sight_while_a_table_scrolls(browser, page):
    show(browser, page, PHONE)
    table = "document.querySelectorAll('.scroll:has(table)')[0]"
    browser.evaluate(f"{table}.scrollLeft = 300")
    assert browser.evaluate(f"{table}.scrollLeft") == 300, "it is too wide for a phone"
    first = f"{table}.querySelector('tbody td')"
    assert browser.evaluate(f"{first}.textContent") == "persafl_me"
    assert browser.evaluate(f"Math.abs({first}.getBoundingClientRect().x - {table}.getBoundingClientRect().x) < 3")
    assert browser.evaluate(f"getComputedStyle({first}).backgroundColor") == "rgb(255, 255, 255)", (
        "nothing shines through"
    )
    assert browser.evaluate(f"{first}.getBoundingClientRect().width") < PHONE / 2
    picture(browser, "report_400_scrolled", PHONE)
