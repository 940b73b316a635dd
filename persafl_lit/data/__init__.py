"""What the clients hold. Adding a data set: a small file here, a line in the table, a YAML in conf/data."""

from persafl_lit.data.digits import Digits
from persafl_lit.data.federation import SPLITS, Batch, Federation, Samples
from persafl_lit.data.quadratic import Quadratic, Quadratics

DATASETS: dict[str, type[Digits] | type[Quadratic]] = {"digits": Digits, "quadratic": Quadratic}

__all__ = ["DATASETS", "SPLITS", "Batch", "Digits", "Federation", "Quadratic", "Quadratics", "Samples"]
