"""What the clients hold. Adding a data set: a small file here, a line in the table, a YAML in conf/data."""

from typing import Any

from persafl_lit.data.digits import Digits
from persafl_lit.data.federation import SPLITS, Batch, Federation, Samples
from persafl_lit.data.images import Cifar10, FashionMnist, Mnist
from persafl_lit.data.quadratic import Quadratic, Quadratics

DATASETS: dict[str, Any] = {"digits": Digits, "mnist": Mnist, "fashion_mnist": FashionMnist, "cifar10": Cifar10, "quadratic": Quadratic}

__all__ = ["DATASETS", "SPLITS", "Batch", "Cifar10", "Digits", "FashionMnist", "Federation", "Mnist", "Quadratic", "Quadratics", "Samples"]
