"""What a client computes. Adding one: a small file here, a line in the table, a YAML in conf/method."""

from persafl_lit.learning.objectives.maml import Maml
from persafl_lit.learning.objectives.moreau import Moreau
from persafl_lit.learning.objectives.objective import LocalLoss, Objective, Step
from persafl_lit.learning.objectives.plain import Plain
from persafl_lit.learning.objectives.proximal import Proximal
from persafl_lit.learning.objectives.scaffold import Scaffold

OBJECTIVES: dict[str, type[Objective]] = {
    "plain": Plain,
    "proximal": Proximal,
    "maml": Maml,
    "moreau": Moreau,
    "scaffold": Scaffold,
}

__all__ = ["OBJECTIVES", "LocalLoss", "Maml", "Moreau", "Objective", "Plain", "Proximal", "Scaffold", "Step"]
