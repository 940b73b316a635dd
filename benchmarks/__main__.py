"""`make bench`: ratios against tight loops and peers, in one run, into benchmarks/results.json.

`python -m benchmarks [SECTION ...]` measures some sections only and keeps the others' last results. MNIST is looked for
in BENCH_DATA (default: data), peers in PEERS_PYTHON (default: .venv-peers/bin/python, which `make bench` makes).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlflow  # noqa: F401  (imported before anything is timed)
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset

from benchmarks.tight import evaluations_per_second
from persafl_lit import Callback, compose, run
from persafl_lit.data import SPLITS
from persafl_lit.engine.listeners import Listeners
from persafl_lit.timeline import Asynchronous, Setting
from persafl_lit.timeline.delays import Exponential

REPEATS = int(os.environ.get("BENCH_REPEATS", "3"))
CORES = os.cpu_count() or 1
HERE = Path(__file__).parent
MNIST = ["experiment=paper_mnist", f"data.root={os.environ.get('BENCH_DATA', 'data')}", "batch_size=32"]
UNEVALUATED = ["eval.every=1e9", "eval.finetune=none", "eval.beside=[]", "eval.clients=1"]
UPDATES = {"fedasync": 500, "persafl_maml": 124, "persafl_me": 50}
"""About 5,000 gradient evaluations: half a minute here. The paper's runs are longer."""
Measure = Callable[[], float]


class Turns(dict[str, list[float]]):
    """Values of several measures that took turns: the machine's speed drifts, so ratios are of neighbours in time."""

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.items()}

    def ratio(self, above: str, below: str) -> float:
        """The median over turns."""
        return statistics.median(a / b for a, b in zip(self[above], self[below], strict=True))


def turns(**measures: Measure) -> Turns:
    """Each measure once per turn; the order alternates."""
    seen = Turns({name: [] for name in measures})
    for repeat in range(REPEATS):
        for name in list(measures)[:: 1 if repeat % 2 == 0 else -1]:
            seen[name].append(measures[name]())
    return seen


def medians(**measures: Measure) -> dict[str, float]:
    return turns(**measures).medians()


def rate(*overrides: str) -> float:
    """Gradient evaluations per second of a whole run, from the call to its return: the start of its workers, data,
    tracking to the last record."""
    start = time.perf_counter()
    summary = run([*overrides, "tracking.experiment=bench"]).summary()
    return float(summary["grad_evals"] / (time.perf_counter() - start))


def gradients() -> dict[str, Any]:
    """(1) Whole runs against tight loops: cnn2 on MNIST, each of the three options."""
    found = {}
    for method, updates in UPDATES.items():
        ours = partial(rate, *MNIST, f"method={method}", "tracking.model=false", "tracking.figures=false")
        seen = turns(
            own=partial(evaluations_per_second, "cnn2", method, "ours", CORES),
            run=partial(ours, f"updates={updates}", *UNEVALUATED),
            plain=partial(evaluations_per_second, "cnn2", method, "plain", CORES),
            evaluated=partial(ours, f"updates={3 * updates // 2}", "eval.every=null"),
        )
        ratios = {
            f"{above} / {below}": seen.ratio(above, below)
            for above, below in (("run", "plain"), ("run", "own"), ("evaluated", "plain"))
        }
        found[method] = seen.medians() | ratios
    return found


def peers() -> dict[str, Any]:
    """(2) FedAvg, 30 clients, 10 in a round, ten steps each: against Flower and pfl-research."""
    python = os.environ.get("PEERS_PYTHON", ".venv-peers/bin/python")
    if not Path(python).exists():
        return {"skipped": f"no {python}; `make bench` makes it"}

    def peer(name: str) -> float:
        command = [python, "-m", "benchmarks.peers", name, "--processes", str(CORES)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout.strip().splitlines()[-1])["evaluations_per_second"])

    ours = partial(
        rate,
        *MNIST,
        "method=fedavg",
        "schedule.cohort=10",
        "updates=200",
        *UNEVALUATED,
        "tracking.model=false",
        "tracking.figures=false",
    )
    seen = turns(flower=partial(peer, "flower"), ours=ours, pfl=partial(peer, "pfl"))
    return seen.medians() | {"ours / faster peer": min(seen.ratio("ours", "flower"), seen.ratio("ours", "pfl"))}


def workers() -> dict[str, Any]:
    """(3) From one worker to two."""
    ours = partial(rate, *MNIST, "method=fedasync", "updates=300", *UNEVALUATED, "tracking.enabled=false")
    loop = partial(evaluations_per_second, "cnn2", "fedasync", "ours")
    seen = turns(
        one_loop=partial(loop, 1),
        one=partial(ours, "workers=1"),
        two=partial(ours, "workers=2"),
        two_loops=partial(loop, 2),
    )
    return seen.medians() | {
        "speed-up": seen.ratio("two", "one"),
        "speed-up of loops": seen.ratio("two_loops", "one_loop"),
    }


def overhead() -> dict[str, Any]:
    """(4) What a job of a tiny model costs beyond its ten gradients, in milliseconds: the slope over updates, one
    worker."""

    def job() -> float:
        walls = []
        for updates in (200, 1200):
            overrides = [
                "model=logistic",
                "method=fedasync",
                "batch_size=32",
                f"updates={updates}",
                "executor=serial",
                *UNEVALUATED,
            ]
            walls.append(run([*overrides, "tracking.enabled=false", "checkpoint.every=0"]).wall_seconds)
        return (walls[1] - walls[0]) / 1000 * 1e3

    figures = medians(
        job=job, gradients=lambda: 10 / evaluations_per_second("logistic", "fedasync", "plain", 1, 3.0) * 1e3
    )
    return figures | {"milliseconds beyond gradients": figures["job"] - figures["gradients"]}


def scaling() -> dict[str, Any]:
    """(5) More clients, the same number of updates: wall time and peak memory of a process that does only this."""
    overrides = [
        "data=quadratic",
        "method=fedasync",
        "updates=20000",
        "eval.every=1e9",
        "eval.clients=10",
        "eval.beside=[]",
    ]

    def alone(clients: int, what: str) -> float:
        code = (
            "import json, sys, persafl_lit.api as api; "
            "r = api.run(sys.argv[1:]); "
            # ru_maxrss begins with the parent's
            "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')); "
            "print(json.dumps({'seconds': r.wall_seconds, 'MB': int(peak.split()[1]) / 1024}))"
        )
        arguments = [*overrides, f"clients={clients}", "tracking.enabled=false", "checkpoint.every=0"]
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout.strip().splitlines()[-1])[what])

    counts = (30, 300, 3000, 30000)
    seconds = medians(**{str(count): partial(alone, count, "seconds") for count in counts})
    memory = {str(count): alone(count, "MB") for count in counts}
    return {"seconds": seconds, "peak MB": memory, "30000 / 30": seconds["30000"] / seconds["30"]}


def timeline() -> dict[str, Any]:
    """(6) A timeline of a million arrivals of 10,000 clients."""

    def million() -> float:
        start = time.perf_counter()
        Asynchronous().timeline(Setting(10_000, 10, Exponential(), 0, None, 1_000_000))
        return 1_000_000 / (time.perf_counter() - start)

    return medians(**{"arrivals per second": million})


def tracking() -> dict[str, Any]:
    """(7) What tracking adds to a paper-sized run, the shortest one: the model, the picture and the tables included.

    Whole runs differ by more than that from one to the next. So what is compared is the CPU time of the run's own
    process, spread over the cores that it takes from the workers, and the time from the last update to the end, though
    they overlap.
    """
    walls = []

    class Last:
        def on_update(self) -> None:
            self.update = time.perf_counter()

    def beside(*more: str) -> float:
        last, start, used = Last(), time.perf_counter(), time.process_time()
        run([*MNIST, "method=fedasync", *more], callbacks=[last])
        end = time.perf_counter()
        walls.append(end - start)
        return (time.process_time() - used) / CORES + end - last.update

    seen = turns(
        tracked=partial(beside, "tracking.experiment=bench"), untracked=partial(beside, "tracking.enabled=false")
    )
    added = statistics.median(a - b for a, b in zip(seen["tracked"], seen["untracked"], strict=True))
    return {
        "seconds of a run": statistics.median(walls),
        "seconds of tracking": added,
        "cost": added / statistics.median(walls),
    }


def hooks() -> dict[str, Any]:
    """(9) The share of a paper-sized run that callbacks and loggers take: two callbacks with every hook, and a CSV
    logger.

    What they take is timed where the loop calls them: far less than whole runs differ by.
    """
    spent = 0.0

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def call(*about: Any, **more: Any) -> None:
            nonlocal spent
            start = time.perf_counter()
            method(*about, **more)
            spent += time.perf_counter() - start

        return call

    def share() -> float:
        nonlocal spent
        spent = 0.0
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            for name in ("tell", "log"):
                patch.setattr(Listeners, name, timed(getattr(Listeners, name)))
            result = run(
                [*MNIST, "method=fedasync", "tracking.enabled=false"],
                callbacks=[Callback(), Callback()],
                loggers=[CSVLogger(folder)],
            )
        return spent / result.wall_seconds

    return medians(**{"share of a run": share})


class Kept(Dataset):
    """Images and labels as a user would keep them."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.targets = images, labels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.targets[index])


def own_data() -> dict[str, Any]:
    """(10) The same images as a list of Datasets: gradient evaluations per second of training, in memory and by index,
    against data=mnist.

    The clients hold what they hold in the built-in set, so that all three draw the same batches. What comes before
    training is apart.
    """
    built = compose(MNIST).federation()
    images, labels = built.inputs[torch.arange(built.inputs.shape[0])], built.labels  # type: ignore[attr-defined]
    clients = [tuple(Kept(images[part[split]], labels[part[split]]) for split in SPLITS) for part in built.parts]  # type: ignore[attr-defined]
    paper = ["experiment=paper_mnist", "batch_size=32"]
    before: dict[str, list[float]] = {}

    def training(name: str, *overrides: str, data: Any = None) -> float:
        class Watch:
            def on_run_start(self) -> None:
                self.start = time.perf_counter()

            def on_run_end(self) -> None:
                self.end = time.perf_counter()

        watch, start = Watch(), time.perf_counter()
        updates = f"updates={os.environ.get('BENCH_UPDATES', '500')}"
        summary = run(
            [*overrides, "method=fedasync", updates, *UNEVALUATED, "tracking.enabled=false"],
            data=data,
            callbacks=[watch],
        ).summary()
        before.setdefault(name, []).append(watch.start - start)
        return float(summary["grad_evals"] / (watch.end - watch.start))

    seen = turns(
        built_in=partial(training, "built_in", *MNIST),
        memory=partial(training, "memory", *paper, data=clients),
        index=partial(training, "index", *paper, "data=custom", "data.in_memory=0", data=clients),
    )
    ratios = {f"{name} / built_in": seen.ratio(name, "built_in") for name in ("memory", "index")}
    return (
        seen.medians()
        | ratios
        | {f"seconds before training, {name}": statistics.median(values) for name, values in before.items()}
    )


def resnet() -> dict[str, Any]:
    """(11) Whole runs of ResNet-18 with BatchNorm against tight loops of the same network, on MNIST."""
    settings = ["data=mnist", *MNIST[1:], "model=torchvision", "method=fedasync", *UNEVALUATED]
    settings.append(f"updates={os.environ.get('BENCH_UPDATES', '60')}")
    ours = partial(rate, *settings, "tracking.enabled=false", "checkpoint.every=0")
    loop = partial(evaluations_per_second, "resnet18", "fedasync")
    seen = turns(
        own=partial(loop, "ours", CORES),
        run=partial(ours, "model.buffers=local"),
        plain=partial(loop, "plain", CORES),
        shared=partial(ours, "model.buffers=shared"),
    )
    ratios = {
        f"{above} / {below}": seen.ratio(above, below)
        for above, below in (("run", "plain"), ("run", "own"), ("shared", "plain"))
    }
    return seen.medians() | ratios


def startup() -> dict[str, Any]:
    """(8) From the command to its answer, in seconds, and what imports take of it."""
    python = sys.executable
    first = (
        "import sys, time; begin = time.perf_counter(); "
        "from persafl_lit import run; imported = time.perf_counter() - begin\n"
        "class First:\n"
        "    def on_update(self):\n"
        "        print(imported, time.perf_counter() - begin, flush=True); import os; os._exit(0)\n"
        "    def on_evaluation(self, point): pass\n"
        "run(sys.argv[1:], callbacks=[First()])"
    )

    def command(*arguments: str) -> float:
        start = time.perf_counter()
        subprocess.run([python, *arguments], capture_output=True, check=True)
        return time.perf_counter() - start

    def to_first_update(which: int, *overrides: str) -> float:
        done = subprocess.run([python, "-c", first, *overrides], capture_output=True, text=True, check=True)
        return float(done.stdout.split()[which])

    return medians(
        **{
            "persafl --help": partial(command, "-m", "persafl_lit", "--help"),
            "import lightning": partial(command, "-c", "import lightning"),
            "imports of a run": partial(to_first_update, 0, "data=digits"),
            "digits: run to first update": partial(to_first_update, 1, "data=digits"),
            "mnist: imports": partial(to_first_update, 0, *MNIST),
            "mnist: run to first update": partial(to_first_update, 1, *MNIST),
        }
    )


SECTIONS = {
    section.__name__: section
    for section in (gradients, peers, workers, overhead, scaling, timeline, tracking, startup, hooks, own_data, resnet)
}


def main(chosen: list[str]) -> int:
    console, file = Console(highlight=False), HERE / "results.json"
    if unknown := [name for name in chosen if name not in SECTIONS]:
        console.print(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
        return 2
    torch.set_num_threads(1)
    results = json.loads(file.read_text()) if file.exists() else {}
    results["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "cores": CORES,
        "torch": torch.__version__,
        "repeats": REPEATS,
    }
    for name in chosen or SECTIONS:
        results[name] = SECTIONS[name]()
        file.write_text(json.dumps(results, indent=2) + "\n")
        console.print(_table(name, results[name]))
    return 0


def _table(name: str, figures: dict[str, Any]) -> Table:
    table = Table("what", "figure", title=(SECTIONS[name].__doc__ or name).strip(), title_justify="left")
    for key, value in figures.items():
        inner = value if isinstance(value, dict) else {"": value}
        for what, figure in inner.items():
            table.add_row(f"{key} {what}".strip(), f"{figure:.3f}" if isinstance(figure, float) else str(figure))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
