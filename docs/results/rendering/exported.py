"""The exported sweeps: a folder here is one sweep of sweeps/, written by `persafl report NAME --out docs/results/NAME`;
runs.csv has one row per trial, curves.csv one row per evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parents[1]
SWEEPS = HERE.parents[1] / "sweeps"
PAIRS = (("fedavg", "fedasync"), ("per_fedavg", "persafl_maml"), ("pfedme", "persafl_me"))
"""Each synchronous method and its asynchronous counterpart."""
ASYNCHRONOUS = tuple(late for _, late in PAIRS)
NAMES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "per_fedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "fedasync": "FedAsync",
    "persafl_maml": "PersA-FL-MAML",
    "persafl_me": "PersA-FL-ME",
    "fedbuff": "FedBuff",
    "local": "local training",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "lg_fedavg": "LG-FedAvg",
    "ditto": "Ditto",
    "apfl": "APFL",
    "fedadam": "FedAdam",
    "ca2fl": "CA2FL",
    "ace": "ACE",
}


@dataclass(frozen=True)
class Results:
    """One exported sweep; only finished trials."""

    name: str
    runs: pd.DataFrame
    curves: pd.DataFrame
    failed: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Trials that have no result, such as those that diverged."""

    @property
    def settings(self) -> list[str]:
        """The varied keys."""
        return [column for column in self.runs if "." in column]

    def methods(self) -> list[str]:
        return [method for method in NAMES if method in set(self.runs.method)]

    def chosen(self, method: str) -> pd.DataFrame:
        """The rows of a method's best setting: highest mean validation accuracy among those that were run on most
        seeds."""
        rows = self.runs[self.runs.method == method]
        groups = (
            [group.sort_values("seed") for _, group in rows.groupby(self.settings, dropna=False)]
            if self.settings
            else [rows]
        )
        most = max(len(group) for group in groups)
        return max((group for group in groups if len(group) == most), key=lambda group: group.accuracy_val.mean())

    def setting(self, method: str) -> dict[str, float]:
        """What was chosen: the numbers among the varied keys that the method has."""
        row = self.chosen(method).iloc[0]
        return {
            key.split(".")[-1]: row[key]
            for key in self.settings
            if isinstance(row[key], (int, float)) and not pd.isna(row[key])
        }

    def different(self, row: pd.Series) -> dict[str, str | float]:
        """Where one factor at a time is varied: the settings of a trial that are not its method's most frequent."""
        every = pd.concat([self.runs, self.failed])
        usual = every[every.method == row["method"]][self.settings].mode(dropna=False).iloc[0]
        return {key: row[key] for key in self.settings if not pd.isna(row[key]) and row[key] != usual[key]}

    def varied(self, row: pd.Series) -> dict[str, str | float]:
        """The settings of a trial that vary among its method's trials."""
        every = pd.concat([self.runs, self.failed])
        mine = every[every.method == row["method"]]
        return {key: row[key] for key in self.settings if mine[key].nunique() > 1 and not pd.isna(row[key])}

    def test(self, method: str) -> pd.Series:
        """Final test accuracy by seed."""
        return self.chosen(method).set_index("seed").accuracy_test

    def curve(self, trial: str) -> pd.DataFrame:
        return self.curves[self.curves.trial == trial].sort_values("sim_time")

    def around(self, method: str, axis: str, limit: pd.Series) -> tuple[pd.Series, pd.Series]:
        """Test accuracy by seed at the evaluations around a limit: the last one within it, and the first one that is
        not below it."""
        within, beyond = {}, {}
        for row in self.chosen(method).itertuples():
            if row.seed in limit.index:
                curve = self.curve(row.trial)
                within[row.seed] = curve[curve[axis] <= limit[row.seed]].accuracy_test.iloc[-1]
                beyond[row.seed] = curve[curve[axis] >= min(limit[row.seed], curve[axis].max())].accuracy_test.iloc[0]
        return pd.Series(within), pd.Series(beyond)

    def reached(self, method: str, level: float) -> float | None:
        """First evaluation at which the mean over seeds of the chosen setting reaches a level."""
        chosen = self.chosen(method)
        mean = self.curves[self.curves.trial.isin(chosen.trial)].groupby("sim_time").accuracy_test.mean()
        late = mean[mean >= level]
        return None if late.empty else float(late.index[0])


def load(name: str) -> Results | None:
    """The exported results of a sweep, or None where there are none yet."""
    folder = HERE / name
    if not (folder / "runs.csv").exists():
        return None
    runs, curves = pd.read_csv(folder / "runs.csv"), pd.read_csv(folder / "curves.csv")
    finished = runs[runs.status == "FINISHED"].reset_index(drop=True)
    return Results(name, finished.astype({"versions": int}), curves, runs[runs.status == "FAILED"])
