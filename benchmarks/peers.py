"""Gradient evaluations per second of two peer simulators: `PEERS_PYTHON -m benchmarks.peers flower|pfl`, from the
repository's root.

The work is the one that our simulator is measured on: federated averaging; a cohort of clients per round; each client
takes `local_steps` SGD steps on batches of `batch` samples; a convolutional network of 582,026 parameters; random
inputs of MNIST's shape. The peers have an environment of their own, without ours, so this file imports torch and one
peer, nothing of persafl_lit.

In doubt the peers are favoured: all data is in memory before the clock starts, nothing is evaluated, and the clock runs
from the end of the first round to the end of the last one. The last line on stdout is a JSON object; whatever else a
peer says comes before it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from flwr.app import Context, Message

LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Work:
    """What is simulated; each field is an option of the command line."""

    clients: int = 30
    cohort: int = 10
    rounds: int = 6
    local_steps: int = 10
    batch: int = 32
    processes: int = 2

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise ValueError(f"the first round is not measured, so at least 2 rounds are needed; got {self.rounds!r}")
        if not 1 <= self.cohort <= self.clients:
            raise ValueError(f"a cohort has between 1 and {self.clients} clients; got {self.cohort!r}")


class Network(nn.Sequential):
    """Two convolutions and two linear layers with dropout, and the loss as a method, which is how pfl wants it.

    In PyTorch's default memory layout: neither peer changes it. Ours chooses channels_last by itself, which is a part
    of the ratio.
    """

    def __init__(self) -> None:
        convolutions = (
            nn.Conv2d(1, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        head = (nn.Dropout(0.25), nn.Linear(1024, 512), nn.ReLU(), nn.Dropout(0.25), nn.Linear(512, 10))
        super().__init__(*convolutions, *head)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(inputs), labels)


@cache
def federation(clients: int, samples: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of every client, from a fixed seed; made once per process, all at once, so that no measured
    round pays for it.

    A client has as many samples as it uses in one round (320 by default): pfl never goes past the end of a client's
    data.
    """
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(samples, 1, 28, 28, generator=generator), torch.randint(10, (samples,), generator=generator))
        for _ in range(clients)
    ]


def report(
    peer: str, package: str, work: Work, processes: int, start: float, ends: list[float], steps: list[int]
) -> None:
    """Print the result, given the wall time at the end of each round and the local steps that were done in each.

    Flower goes on after a client has failed, so the work is counted and not assumed; a figure for a part of it would be
    wrong.
    """
    expected = [work.cohort * work.local_steps] * work.rounds
    if steps != expected:
        raise RuntimeError(f"{peer} did {steps} local steps in its rounds instead of {expected}; its log may say why")
    result = {
        "peer": peer,
        "version": version(package),
        "evaluations_per_second": sum(steps[1:]) / (ends[-1] - ends[0]),
        "startup_seconds": ends[0] - start,
        "rounds": work.rounds,
        "processes": processes,
    }
    print(json.dumps(result), flush=True)


@cache
def actor_network() -> Network:
    """One network per actor: Flower's examples build one per message, which costs a random initialisation each time."""
    return Network()


def flower_client(message: Message, context: Context) -> Message:
    """One client's part of a round: weights in, `local_steps` SGD steps, weights out."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    batch, local_steps = (int(message.content["config"][name]) for name in ("batch", "local-steps"))
    inputs, labels = federation(int(context.node_config["num-partitions"]), batch * local_steps)[
        int(context.node_config["partition-id"])
    ]
    network = actor_network()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    steps = 0
    for batch_inputs, batch_labels in zip(inputs.split(batch), labels.split(batch), strict=True):
        optimizer.zero_grad()
        network.loss(batch_inputs, batch_labels).backward()
        optimizer.step()
        steps += 1
    metrics = MetricRecord({"num-examples": len(labels), "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)


def flower(work: Work) -> None:
    """Flower's FedAvg on its Ray simulation engine: `processes` client actors of one CPU each, and the server in this
    process.

    `run_simulation` is deprecated in favour of `flwr run`, which puts a project and a SuperLink process around the same
    engine. Ray's head process asks the link-local address 169.254.169.254 once which cloud it is in, usage statistics
    or not; where that is unwanted, run this without a network.
    """
    os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
        "0"  # despite its name, on Linux too: Ray's services then stay on loopback
    )
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    start = time.perf_counter()
    ends: list[float] = []
    steps: list[int] = []

    def count_steps(replies: list[RecordDict], _: str) -> MetricRecord:
        steps.append(sum(int(reply["metrics"]["steps"]) for reply in replies))
        return MetricRecord()

    def note_end(server_round: int, _: ArrayRecord) -> None:
        """Flower's hook for central evaluation, which it also calls before the first round."""
        if server_round > 0:
            ends.append(time.perf_counter())

    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(flower_client)

    @server_app.main()
    def serve(grid: Grid, _: Context) -> None:
        strategy = FedAvg(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
            train_metrics_aggr_fn=count_steps,
        )
        config = ConfigRecord({"batch": work.batch, "local-steps": work.local_steps})
        strategy.start(
            grid, ArrayRecord(Network().state_dict()), work.rounds, train_config=config, evaluate_fn=note_end
        )

    backend = {
        "init_args": {
            "address": "local",
            "num_cpus": work.processes,
        },  # a cluster of our own, even where one is running
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=backend)
    report("flower", "flwr", work, work.processes, start, ends, steps)


def start_pfl_workers(processes: int) -> list[subprocess.Popen[bytes]]:
    """Make this process worker 0 of `processes` and start the others: this same command, told apart by pfl's
    environment variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    # pfl takes the number of workers from this list and connects all of them to its first entry.
    os.environ |= {"PFL_WORKER_ADDRESSES": ",".join([address] * processes), "PFL_WORKER_RANK": "0"}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "benchmarks.peers", *sys.argv[1:]]
    return [subprocess.Popen(command, env=os.environ | {"PFL_WORKER_RANK": str(rank)}) for rank in range(1, processes)]


def pfl(work: Work) -> None:
    """pfl's FederatedAveraging on its SimulatedBackend, in `processes` processes that share each cohort.

    One process is pfl's default. More of them are what its guide "Fast distributed simulations" describes: the same
    script started once per worker, with PFL_WORKER_ADDRESSES and PFL_WORKER_RANK in the environment, which pfl reads
    when it is imported.
    """
    leader = "PFL_WORKER_RANK" not in os.environ
    workers = start_pfl_workers(work.processes) if leader and work.processes > 1 else []
    try:
        ends, steps, start = simulate_with_pfl(work)
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.kill()
    if leader:
        report("pfl", "pfl", work, work.processes, start, ends, steps)


def simulate_with_pfl(work: Work) -> tuple[list[float], list[int], float]:
    """The wall time at the end of each round, the local steps of all workers in each, and the wall time when the
    imports were done."""
    import numpy as np

    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"
    from pfl.aggregate.base import get_num_devices_weight_name
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.common_types import Population
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    start = time.perf_counter()
    ends: list[float] = []
    steps: list[int] = []

    class PflNetwork(Network):
        def metrics(self, inputs: Tensor, _: Tensor) -> dict[str, Any]:
            """pfl evaluates in the first round whatever it is told; this makes it free."""
            return {"samples": Weighted.from_unweighted(len(inputs))}

    class NoteEnd(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            ends.append(time.perf_counter())
            steps.append(int(aggregate_metrics[get_num_devices_weight_name(Population.TRAIN)]) * work.local_steps)
            return False, Metrics()

    torch.set_num_threads(1)
    torch.manual_seed(0)  # all workers must start from the same weights
    np.random.seed(0)  # and sample the same cohorts
    network = PflNetwork()
    data = federation(work.clients, work.batch * work.local_steps)
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(data[user]), get_user_sampler("minimize_reuse", list(range(work.clients)))
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=work.rounds,
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        PyTorchModel(network, torch.optim.SGD, central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=work.batch,
            local_num_epochs=None,
            local_learning_rate=LEARNING_RATE,
            local_num_steps=work.local_steps,
        ),
        callbacks=[NoteEnd()],
        send_metrics_to_platform=False,
    )
    return ends, steps, start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    peers = {"flower": flower, "pfl": pfl}
    parser.add_argument("peer", choices=peers)
    for field in fields(Work):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = vars(parser.parse_args())
    peers[options.pop("peer")](Work(**options))


if __name__ == "__main__":
    # Under its own name rather than __main__, which would mean something else in the actors that unpickle
    # flower_client.
    from benchmarks.peers import main as run

    run()
