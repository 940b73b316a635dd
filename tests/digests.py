"""SHA-256 of the final models of a set of runs, as JSON: the oracle of a refactoring.

    python -m tests.digests > before.json        # on the old code
    python -m tests.digests --compare before.json    # on the new code: exit 1 and a line for every run that differs

Bits repeat on one kind of processor, so the digests themselves are not kept in the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUIET = ["tracking.enabled=false"]
SMALL = [
    *QUIET,
    "model=mlp",
    "model.hidden=[16]",
    "model.dropout=0.2",
    "clients=8",
    "updates=60",
    "local_steps=3",
    "checkpoint.every=6",
]
ROUNDS = ["schedule.cohort=3"]
METHODS = {
    "fedasync": [],
    "persafl_maml": [],
    "persafl_me": ["method.inner_steps=3"],
    "fedavg": ROUNDS,
    "fedprox": ROUNDS,
    "scaffold": ROUNDS,
    "per_fedavg": ROUNDS,
    "pfedme": [*ROUNDS, "method.inner_steps=3"],
    "fedbuff": ["method.buffer=4"],
    "fedasync_mix": [],
    "local": [],
}
SERIAL, TWO = ["executor=serial"], ["executor=processes", "workers=2"]
CASES = {
    f"{method} {name}": [f"method={method}", *more, *SMALL, *executor]
    for method, more in METHODS.items()
    for name, executor in (("serial", SERIAL), ("2 workers", TWO))
}
CASES |= {
    "cnn with dropout": [
        "method=persafl_maml",
        *QUIET,
        "clients=6",
        "updates=12",
        "local_steps=2",
        "model.dropout=0.3",
    ],
    "held-out clients": ["method=persafl_me", *SMALL, "data.holdout_clients=2", *TWO],
    "buffer": ["method=persafl_maml", *SMALL, "method.buffer=5", "method.discount=polynomial", *TWO],
    "drawn": ["method=persafl_me", *SMALL, "schedule=drawn", *TWO],
    "scaffold, all clients a round": ["method=scaffold", *SMALL, "schedule.cohort=8", *TWO],
    "drop": ["method=fedasync", *SMALL, "schedule.tau=3", "schedule.policy=drop", *TWO],
    "wait": ["method=fedasync", *SMALL, "schedule.tau=3", *TWO],
    "clip": ["method=fedasync", *SMALL, "clip=0.5", *TWO],
    "finite differences": ["method=persafl_maml", *SMALL, "method.hvp=finite_difference", *TWO],
    "inner tolerance": ["method=persafl_me", *SMALL, "method.nu=0.5", "method.inner_steps=20", *TWO],
    "bf16-mixed": ["method=persafl_me", *SMALL, "precision=bf16-mixed", *SERIAL],
    "quadratic maml": ["method=persafl_maml", *QUIET, "data=quadratic", "clients=8", "updates=60", "eta=0.01", *TWO],
    "skipped updates": [
        "method=fedasync",
        *QUIET,
        "on_divergence=skip",
        "data=quadratic",
        "data.condition=1e12",
        "clients=8",
        "updates=80",
        "local_steps=9",
        "eta=0.5",
        *TWO,
    ],
    "gradient measured": ["method=persafl_maml", *SMALL, "eval.gradient=true", *TWO],
}


def of(folder: Path) -> str:
    """The digest of the model, curves and clients that `run` left in a folder."""
    return hashlib.sha256((folder / "bits").read_bytes()).hexdigest()


def run_here(overrides: list[str], folder: Path) -> None:
    from persafl_lit import run

    os.chdir(folder)
    result = run(overrides)
    model = b"".join(
        name.encode() + value.contiguous().numpy().tobytes() for name, value in sorted(result.state_dict().items())
    )
    (folder / "model").write_text(hashlib.sha256(model).hexdigest())
    (folder / "bits").write_bytes(model + json.dumps([result.curves(), result.clients()]).encode())


def killed_and_resumed(overrides: list[str], folder: Path) -> str:
    """kill -9 as soon as the second checkpoint is there, then --resume to the end: the digest of the saved model."""
    import torch

    command = [sys.executable, "-m", "persafl_lit", "run", *overrides, "--save-model", "model.pt"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not list(folder.glob("mlruns/checkpoints/*.previous.pt")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"
    subprocess.run([*command, "--resume"], cwd=folder, env=environment, check=True, capture_output=True)
    state = torch.load(folder / "model.pt", weights_only=True)
    return hashlib.sha256(
        b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(state.items()))
    ).hexdigest()


def digests() -> dict[str, str]:
    found = {}
    for name, overrides in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            run_here(overrides, Path(folder))
            found[name] = of(Path(folder))
            found[f"{name}: model"] = (Path(folder) / "model").read_text()
            os.chdir(ROOT)
        print(name, found[name][:12], file=sys.stderr)
    for method in ("persafl_me", "scaffold"):
        longer = [f"method={method}", *METHODS[method], *SMALL, "updates=300", *TWO]
        with tempfile.TemporaryDirectory() as folder:
            found[f"killed and resumed {method}: model"] = killed_and_resumed(longer, Path(folder))
        with tempfile.TemporaryDirectory() as folder:
            run_here(longer, Path(folder))
            undisturbed = (Path(folder) / "model").read_text()
            os.chdir(ROOT)
        assert undisturbed == found[f"killed and resumed {method}: model"]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    now = digests()
    if options.compare is None:
        print(json.dumps(now, indent=1))
        sys.exit()
    before = json.loads(options.compare.read_text())
    different = [name for name in before if now.get(name) != before[name]]
    for name in different:
        print(f"differs: {name}")
    print(f"{len(before) - len(different)} of {len(before)} digests are the same")
    sys.exit(bool(different))
