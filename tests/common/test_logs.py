"""What is logged where: commands, Python, other processes, and the loggers of others."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import pytest

from persafl_lit.cli import main
from persafl_lit.common.logs import PACKAGE, LogSettings, quieted, shown_on_stderr

RUN = ["run", "data=quadratic", "clients=3", "updates=4", "executor=serial", "tracking.enabled=false", "--resume"]
INFO = "persafl: resuming nothing: no interrupted run of this config"
DETAIL = "persafl: 4 updates by simulated time"


@pytest.mark.parametrize(
    ("flag", "info", "detail"), [([], True, False), (["-q"], False, False), (["-v"], True, True)], ids=str
)
def test_q_shows_warnings_only_and_v_details(flag, info, detail, capsys):
    assert main([*RUN, *flag]) == 0
    said = capsys.readouterr()
    assert (INFO in said.err, DETAIL in said.err) == (info, detail)
    assert ("update 4/4" in said.err) == info, "progress is no warning"
    assert "personalised" in said.out or "test loss" in said.out, "the result is on stdout in any case"


@pytest.mark.parametrize("arguments", [["-q", "run", "nonsense=1"], ["run", "nonsense=1", "-q"]], ids=str)
def test_an_error_is_shown_also_with_q_before_or_after_the_command(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("persafl: unknown key 'nonsense'")


def test_a_command_leaves_the_logger_as_it_was():
    before = PACKAGE.level, PACKAGE.propagate, list(PACKAGE.handlers)
    assert main(["timeline", "clients=3", "updates=4", "-v"]) == 0
    assert (PACKAGE.level, PACKAGE.propagate, PACKAGE.handlers) == before


WARNS = """
import logging, sys
from persafl_lit.common.plugins import warn_once
{before}
warn_once("the conf folder is not there")
logging.getLogger("persafl_lit.api").info("resuming")
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "the conf folder is not there"),
        ("logging.getLogger('persafl_lit').setLevel(logging.ERROR)", ""),
        ("logging.basicConfig(format='%(levelname)s %(name)s')", "WARNING persafl_lit.common.plugins"),
        ("logging.basicConfig(format='%(levelname)s', level='INFO')", "WARNING\nINFO"),
    ],
    ids=["by default", "silenced", "configured", "all"],
)
def test_from_python_warnings_are_shown_and_the_usual_means_of_logging_work(before, said):
    done = subprocess.run([sys.executable, "-c", WARNS.format(before=before)], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (0, said, "")


@pytest.mark.parametrize(
    ("level", "said"), [(logging.INFO, "persafl: the conf folder is not there"), (logging.ERROR, "")]
)
def test_a_process_that_is_started_for_a_command_logs_as_the_command_does(level, said):
    with shown_on_stderr(level):
        settings = json.dumps(LogSettings.current())
    before = (
        f"from persafl_lit.common.logs import LogSettings; LogSettings(*{settings.replace('true', 'True')}).apply()"
    )
    done = subprocess.run([sys.executable, "-c", WARNS.format(before=before)], capture_output=True, text=True)
    lines = [said, "persafl: resuming"] if said else []
    assert (done.returncode, done.stderr.splitlines()) == (0, lines)


def test_a_quieted_logger_has_its_level_back_when_the_last_block_of_any_thread_ends():
    other, first_is_in, second_is_in = logging.getLogger("of.others"), threading.Event(), threading.Event()
    other.setLevel(logging.DEBUG)

    def first():
        with quieted({"of.others": logging.ERROR}):
            first_is_in.set()
            second_is_in.wait(30)

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(30)
    with quieted({"of.others": logging.ERROR}):
        second_is_in.set()
        thread.join()
        assert other.level == logging.ERROR, "the first block is over, the second is not"
    assert other.level == logging.DEBUG


IMPORTS = """
import importlib, logging, os, pkgutil
import lightning, mlflow.pytorch, optuna, plotly.graph_objects, ray, torchvision, matplotlib.pyplot
import persafl_lit
libraries = "alembic", "lightning.fabric", "lightning.pytorch", "mlflow", "mlflow.store.db.utils", "optuna", "ray"
before = dict(os.environ), [logging.getLogger(name).level for name in libraries]
for module in pkgutil.walk_packages(persafl_lit.__path__, "persafl_lit."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert before == (dict(os.environ), [logging.getLogger(name).level for name in libraries])
"""


@pytest.mark.slow
def test_importing_changes_no_environment_variable_and_no_log_level():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
