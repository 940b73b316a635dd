"""A ResNet-18 with BatchNorm on CIFAR-10: each client keeps its own running statistics, or the server mixes them.

persafl data cifar10
python examples/resnet_batchnorm.py
python examples/resnet_batchnorm.py --small      # a tiny network on the digits that are built in: seconds
"""

from __future__ import annotations

import argparse

import persafl_lit

CIFAR10 = {"data": "cifar10", "model.arch": "resnet18", "clients": 20, "batch_size": 32, "eta": 0.05, "updates": 1000}
SMALL = {
    "data": "digits",
    "model.arch": "shufflenet_v2_x0_5",
    "clients": 3,
    "updates": 4,
    "local_steps": 2,
    "eval.finetune": "none",
    "tracking.enabled": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny network on the built-in digits")
    settings = {"method": "fedasync", "model": "torchvision", **(SMALL if parser.parse_args().small else CIFAR10)}
    for buffers in ("local", "shared"):
        result = persafl_lit.run({**settings, "model.buffers": buffers})
        sent = result.summary()["bytes_communicated"] / 1e6
        print(f"model.buffers={buffers}: test accuracy {result.accuracy['test']:.3f}, {sent:.1f} MB sent and received")
    print("GroupNorm instead has no such statistics: model.norm=group")


if __name__ == "__main__":
    main()
