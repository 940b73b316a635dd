"""An installed wheel carries its configuration."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_wheel_works_without_the_checkout(tmp_path):
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {f"persafl_lit/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert len(files) > 30
    assert files <= names
    assert "persafl_lit/py.typed" in names
    assert not [name for name in names if name.startswith("tests")]
    # A wheel is a zip; unpacked into a folder of its own it is what pip would install.
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    probe = f"import sys; sys.path.insert(0, {str(site)!r})\nimport persafl_lit.config.compose as c; print(c.conf_folders()[0]); print(c.compose(['method=fedavg']).schedule['name'])"
    done = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(site / "persafl_lit" / "conf"), "rounds"]
