"""The README is executed: every command and every Python block, in order, in one folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from persafl_lit.cli import main

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BASH = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line for block in BASH for line in block.splitlines() if line.startswith("persafl ")]


def test_the_readme_names_the_two_commands_and_many_others():
    assert "make demo" in BASH[0]
    assert "make test" in BASH[0]
    assert len(COMMANDS) >= 6
    assert len(PYTHON) >= 2


@pytest.mark.slow
def test_every_command_of_the_readme_works(tmp_path):
    for command in COMMANDS:
        assert main(shlex.split(command, comments=True)[1:]) == 0, command
    assert (tmp_path / "schedule.png").stat().st_size > 10_000
    assert (tmp_path / "model.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON)
def test_every_python_block_of_the_readme_works(block, tmp_path):
    (tmp_path / "block.py").write_text(f"{block}\nassert 0 <= result.accuracy['test'] <= 1\n")
    done = subprocess.run(
        [sys.executable, "block.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_document_the_readme_links_to_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target
