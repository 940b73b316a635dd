"""Advice for a run: the theory's step size, the smallest T for an epsilon, and warnings where a setting is outside the
theory's range."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from persafl_lit.errors import ConfigError, shown
from persafl_lit.learning.objectives import Maml, Moreau, Objective, Plain
from persafl_lit.theory import constants
from persafl_lit.theory.bounds import LEAST_LAM, Option, Theorem
from persafl_lit.theory.constants import Constants

if TYPE_CHECKING:
    from persafl_lit.config.compose import Config

ADVICE_KEYS = (*(field.name for field in fields(Constants) if field.name != "affine"), "gap", "epsilon", "T", "tau")
"""What may be given as key=value beside the keys of a run."""


@dataclass(frozen=True)
class Advice:
    """What the theorem of a run's option says about it."""

    option: Option
    constants: dict[str, float]
    origin: str
    """Where L comes from."""
    eta: float | None
    T: int | None
    """The number of server updates that eta is for."""
    least_updates: float | None
    updates_for_epsilon: float | None
    warnings: list[str]
    notes: list[str]


def option_of(objective: Objective) -> Option:
    """The theorem that is about an objective."""
    for option, kind in (("a", Plain), ("b", Maml), ("c", Moreau)):
        if type(objective) is kind:
            return option  # type: ignore[return-value]
    raise ConfigError(
        f"the paper has no theorem about the objective {type(objective).__name__.lower()}; it has them about "
        "plain, maml and moreau"
    )


def warnings(L: float, objective: Objective, eta: float, Q: int) -> list[str]:
    """Settings that no theorem covers, given the smoothness of the clients' costs."""
    found = []
    personal_L = L
    if type(objective) is Maml:
        personal_L = L * (1 + objective.alpha * L) ** 2
        if objective.alpha * L > 1:
            found.append(
                f"method.alpha={objective.alpha:g} is above 1/L = {1 / L:.3g}: the adaptation step "
                "overshoots, and I - alpha H changes sign"
            )
    elif type(objective) is Moreau:
        lam = objective.lam
        if lam <= L:
            found.append(
                f"method.lam={lam:g} is not above L = {L:.3g}: the inner problem need not be strongly convex; "
                f"take {LEAST_LAM:g} L or more"
            )
        elif lam < LEAST_LAM * L:
            found.append(f"method.lam={lam:g} is below 7 L = {LEAST_LAM * L:.3g}, which Theorem PersA-FL-ME asks for")
        if objective.inner_lr is not None and objective.inner_lr >= 2 / (lam + L):
            found.append(
                f"method.inner_lr={objective.inner_lr:g} is not below 2/(lam + L) = {2 / (lam + L):.3g}: the "
                "inner steps diverge"
            )
        personal_L = lam * L / (lam - L) if lam > L else math.inf
    if type(objective) in (Plain, Maml, Moreau) and math.isfinite(personal_L):
        most = 1 / (8 * personal_L * Q) if type(objective) is Maml else 1 / (4 * personal_L * (Q + 1))
        if eta > most:
            form = (
                "1/(8 L_b Q)"
                if type(objective) is Maml
                else "1/(4 L (Q + 1))"
                if type(objective) is Plain
                else "1/(4 L_c (Q + 1))"
            )
            found.append(f"eta={eta:g} is above {form} = {most:.3g}, the largest step of the proofs")
    return found


def split_overrides(overrides: list[str]) -> tuple[dict[str, float], list[str]]:
    """Constants that are given, and the overrides of a run."""
    given: dict[str, float] = {}
    rest = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key not in ADVICE_KEYS:
            rest.append(text)
            continue
        try:
            given[key] = float(value)
        except ValueError:
            raise ConfigError(f"{key} must be a number; got {shown(value)}") from None
        if not (given[key] >= 0 and math.isfinite(given[key])) or (key in ("L", "T", "epsilon") and given[key] == 0):
            raise ConfigError(f"{key} must be {'> 0' if key in ('L', 'T', 'epsilon') else '>= 0'}; got {shown(value)}")
    for text in rest:
        key = text.partition("=")[0]
        for name in ADVICE_KEYS:
            if key.lower() == name.lower():
                raise ConfigError(f"unknown key {key!r}. Did you mean {name!r}?")
    return given, rest


def advise(
    given: dict[str, float], config: Config, estimated: dict[str, float] | None = None, origin: str = "given"
) -> Advice:
    """Put constants (given ones win over estimated ones) and a run's settings into the theorem of its option."""
    known = {**(estimated or {}), **given}
    if "L" not in known:
        raise ConfigError(
            "L is needed: give it as L=..., or leave it out to have it estimated on the run's own model and data"
        )
    objective = config.objective()
    option = option_of(objective)
    found = warnings(known["L"], objective, config.eta, config.local_steps)
    notes = []
    limit = config.schedule.get("tau")
    tau = int(known.get("tau", limit if limit is not None else 0))
    if "tau" not in known and limit is None and config.schedule["name"] != "rounds":
        notes.append("the schedule bounds no staleness; tau=0 is assumed: set schedule.tau or tau")
    if config.schedule["name"] == "asynchronous":
        notes.append(
            "under schedule=asynchronous fast clients arrive more often, so i_t is not uniform as Assumption "
            "1 asks; schedule=drawn is"
        )
    if config.method.get("beta", 1.0) != 1.0:
        notes.append(f"the theorems are about beta = 1; this run has method.beta={config.method['beta']:g}")
    about: dict[str, Any] = {}
    if type(objective) is Maml:
        about = {"alpha": objective.alpha}
    elif type(objective) is Moreau:
        about = {"lam": objective.lam, "nu": objective.nu or 0.0}
        if objective.nu is None:
            notes.append("the run stops after inner_steps, not at a tolerance: nu=0 is assumed; set method.nu")
        if objective.lam <= known["L"]:
            return Advice(option, known, origin, None, None, None, None, found, notes)
    chosen: Any = {field.name: known[field.name] for field in fields(Constants) if field.name in known}
    c = Constants(**chosen)
    theorem = Theorem(option, c, config.local_steps, tau, config.batch_size, **about)
    if option == "b" and not math.isfinite(theorem.personal.L):
        theorem = replace(theorem, c=replace(c, rho=0.0))
        notes.append("G is not given, so alpha rho G is left out of L_b")
    T = int(known.get("T", config.updates or math.ceil(theorem.least_updates)))
    if theorem.least_updates > T:
        found.append(
            f"T={T} is below {theorem.least_updates:.6g}, the smallest that the theorem admits with tau={tau} "
            f"and Q={config.local_steps}"
        )
    for_epsilon = None
    if "epsilon" in known:
        needed = ["sigma_g", "gamma_g", "gap", *(["G"] if option == "b" else [])]
        missing = [name for name in needed if name not in known]
        if missing:
            notes.append(f"the smallest T for epsilon needs {', '.join(missing)} as well")
        else:
            for_epsilon = theorem.updates_for(known["epsilon"], known["gap"])
            if math.isinf(for_epsilon):
                floor = theorem.bound(1.0, known["gap"]).floor
                cure = (
                    "lower method.alpha or raise batch_size"
                    if option == "b"
                    else "lower method.nu, or raise method.lam and batch_size"
                )
                found.append(f"no T reaches epsilon={known['epsilon']:g}: the bias alone leaves {floor:.3g}; {cure}")
    return Advice(
        option, known | personal(theorem), origin, theorem.eta(T), T, theorem.least_updates, for_epsilon, found, notes
    )


def personal(theorem: Theorem) -> dict[str, float]:
    """L_b, mu_b, ... or L_c, mu_c, ...; nothing for Option A, and nothing that depends on constants that are not
    known."""
    if theorem.option == "a":
        return {}
    values = (
        constants.maml(theorem.c, theorem.alpha, theorem.b)
        if theorem.option == "b"
        else constants.moreau(theorem.c, theorem.lam, theorem.nu, theorem.b)
    )
    return {
        f"{name}_{theorem.option}": float(getattr(values, name))
        for name in ("L", "mu", "sigma", "gamma")
        if math.isfinite(getattr(values, name))
    }
