"""How updates enter the shared model."""

from persafl_lit.server.all_clients import AllClients
from persafl_lit.server.cached_calibration import CachedCalibration
from persafl_lit.server.rules import ControlVariates, Descent, Mixing, Rule
from persafl_lit.server.server_optimizers import ServerAdagrad, ServerAdam, ServerMomentum, ServerYogi

RULES: dict[str, type[Rule]] = {
    "descent": Descent,
    "control_variates": ControlVariates,
    "mixing": Mixing,
    "momentum": ServerMomentum,
    "adam": ServerAdam,
    "yogi": ServerYogi,
    "adagrad": ServerAdagrad,
    "calibrated": CachedCalibration,
    "all_clients": AllClients,
}
