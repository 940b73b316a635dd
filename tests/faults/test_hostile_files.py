"""Files that users hand in, damaged and hostile: data or one sentence, nothing unpickled, nothing written elsewhere."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from hypothesis import strategies as st

from persafl_lit import compose
from persafl_lit.common import limits
from persafl_lit.data import download as sources
from persafl_lit.data.quadratic import read_npz
from persafl_lit.errors import DataError, PersaflError
from persafl_lit.sweep.plan import read_plan
from persafl_lit.sweep.trials import first_trials
from persafl_lit.timeline import from_csv
from tests.faults.hostile import (
    NUMBERS,
    SIZES,
    TEXTS,
    check_sentence,
    damaged,
    each,
    edited,
    files_under,
    lawful,
    str_of,
)

# -- CSV --------------------------------------------------------------------------------------------------------------

CELLS = st.one_of(st.integers(-3, 10).map(str), st.floats().map(str), NUMBERS.map(str_of), TEXTS)


def table(header):
    return st.lists(st.lists(CELLS, max_size=6).map(",".join), max_size=6).map(
        lambda rows: "\n".join([header, *rows]).encode("utf-8", "surrogatepass")
    )


@SIZES
def test_any_timeline_file_is_a_timeline_or_a_sentence(cases, tmp_path):
    path = tmp_path / "timeline.csv"
    valid = compose(["clients=3", "horizon=20"]).timeline(3).to_csv().encode()

    def law(data):
        path.write_bytes(data)
        timeline = lawful(lambda: from_csv(path, 3))
        if timeline is not None:
            assert (timeline.staleness() >= 0).all()
            timeline.summary()
            lawful(lambda: compose(["schedule=replay", f"schedule.path={path}", "updates=5"]).timeline(3))

    each(cases, st.one_of(damaged(valid), table("client,visit,reads,read_at,arrives"), st.binary(max_size=60)), law)


@SIZES
def test_any_trace_is_delays_or_a_sentence(cases, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_VISITS", 1000)
    path = tmp_path / "trace.csv"
    valid = b"client,download,compute,upload,idle\n0,1,0,4,1\n0,2,0.5,4,1\n7,1e-12,0,0,0\n"

    def law(data):
        path.write_bytes(data)
        lawful(lambda: compose(["delays=trace", f"delays.path={path}", "horizon=1000"]).timeline(3))

    each(cases, st.one_of(damaged(valid), table("client,download,compute,upload,idle"), st.binary(max_size=60)), law)


# -- sweep files ------------------------------------------------------------------------------------------------------

SWEEP = """name: good
overrides: [model=logistic, updates=10]
grid:
  - {method: fedasync, method.beta: [0.8, 1.0]}
  - {method: persafl_me, method.lam: [20, 2.5e1], schedule.tau: [10, null]}
seeds: [0, 1]
select: {metric: accuracy.val, stages: two}
search: {how: random, trials: 3}
"""
WORDS = (
    "name",
    "grid",
    "method",
    "seeds",
    "select",
    "search",
    "eta",
    "low",
    "how",
    "fedasync",
    "random",
    "1e9",
    "~",
    "&a [*a]",
    "!!set {a}",
)
PIECES = st.one_of(st.text("abc-:{}[]&*!|>'\"%@`,# \n\t0.e1", max_size=8), st.sampled_from(WORDS), TEXTS).map(
    lambda text: text.encode("utf-8", "replace")
)


@SIZES
def test_any_sweep_file_is_a_plan_or_a_sentence(cases, tmp_path):
    path, valid = tmp_path / "some.yaml", SWEEP.encode()

    def law(data):
        path.write_bytes(data)
        trials = lawful(lambda: first_trials(read_plan(path)))
        assert trials is None or trials

    edits = st.lists(st.tuples(st.integers(0, len(valid)), st.integers(0, 6), PIECES), min_size=1, max_size=4)
    each(cases, st.one_of(edits.map(lambda made: edited(valid, made)), damaged(valid)), law)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", ".", "missing", "x" * 5000])
def test_only_plain_files_are_read(name, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for action in (
        lambda: from_csv(name, 3),
        lambda: compose(["delays=trace", f"delays.path={name}"]).timeline(3),
        lambda: read_npz(name),
    ):
        with pytest.raises(PersaflError, match="cannot read") as error:
            action()
        check_sentence(str(error.value))


# -- npz --------------------------------------------------------------------------------------------------------------


class Touch:
    """A pickle that makes a file when it is opened."""

    def __reduce__(self):
        return (open, ("pwned", "w"))


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def test_a_pickle_in_an_npz_is_refused_and_not_opened(tmp_path):
    pickle.loads(pickle.dumps(Touch()))
    assert (tmp_path / "pwned").exists(), "the pickle is loaded"
    (tmp_path / "pwned").unlink()
    hostile = np.empty((1, 1), dtype=object)
    hostile[0, 0] = Touch()
    for data in (
        npz(H=hostile, a=hostile),
        pickle.dumps(Touch()),
        npz(H=np.ones((1, 1, 1)), a=np.ones((1, 1)), w0=hostile),
    ):
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(DataError, match="never unpickled|not an npz"):
            read_npz("x.npz")
    assert not (tmp_path / "pwned").exists()


def test_a_file_that_is_no_npz_says_so(tmp_path):
    np.save("x.npy", np.ones(3))
    for name, text in {"x.npy": None, "x.txt": "hello"}.items():
        if text:
            (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match="is not an npz file at all; write it with numpy.savez"):
            read_npz(name)


def test_an_npz_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("persafl_lit.data.npz.MOST_BYTES", 10_000)
    with zipfile.ZipFile("x.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("H.npy", b"\0" * 20_000)
    with pytest.raises(DataError, match=r"unpacks to 20,000 bytes, more than the 10,000"):
        read_npz("x.npz")


@SIZES
def test_any_npz_is_quadratics_or_a_sentence(cases, tmp_path):
    path = tmp_path / "q.npz"
    valid = npz(H=np.stack([np.eye(2)] * 3), a=np.ones((3, 2)), w0=np.zeros(2))
    header = b"\x93NUMPY\x01\x00"

    def member(text):
        described = text.encode()
        return header + len(described).to_bytes(2, "little") + described

    shapes = st.sampled_from(
        [
            "(1000000000, 1000000000)",
            "(-1,)",
            "(1e3,)",
            "()",
            "(2, 2, 2)",
            "(0, 0)",
            "__import__('os').system('touch pwned')",
        ]
    )
    kinds = st.sampled_from(["<f8", "|O", "<U9", "<c16", "|V8", "<M8[s]", "|b1", "<i8", "x", "f" * 50])
    headers = st.tuples(kinds, shapes).map(
        lambda both: member(f"{{'descr': '{both[0]}', 'fortran_order': False, 'shape': {both[1]}, }}\n")
    )

    def zipped(members):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for name, data in members.items():
                file.writestr(name, data)
        return buffer.getvalue()

    odd = st.dictionaries(
        st.sampled_from(["H.npy", "a.npy", "w0.npy", "../x.npy", "H"]),
        st.one_of(headers, st.binary(max_size=40)),
        max_size=3,
    ).map(zipped)
    numbers = st.sampled_from([0.0, 1.0, -1.0, np.nan, np.inf, 1e308, -1e308, 5e-324, 1e154])

    def cast(case):
        with np.errstate(all="ignore"):
            return npz(H=np.full((3, 2, 2), case[0]).astype(case[2]), a=np.full((3, 2), case[1]).astype(case[2]))

    arrays = st.tuples(numbers, numbers, st.sampled_from(["f8", "f4", "i8", "c16", "?", "U3", "O", "f2"])).map(cast)

    def law(data):
        path.write_bytes(data)
        with np.errstate(all="ignore"):
            federation = lawful(
                lambda: compose(["data=quadratic", f"data.path={path}"]).build("data").federation(None, 0)
            )
        assert federation is None or (federation.clients == 3 and np.isfinite(federation.smoothness))

    each(cases, st.one_of(damaged(valid), odd, arrays, st.binary(max_size=60)), law)
    assert files_under(tmp_path) == {"q.npz"}


# -- image files ------------------------------------------------------------------------------------------------------


@SIZES
def test_damaged_image_files_are_never_used(cases, tmp_path):
    """IDX and CIFAR-10 files: whatever is in them, only the official bytes are read."""
    content = st.one_of(
        st.binary(max_size=100),
        st.just((2051).to_bytes(4, "big") + b"\xff" * 12),
        st.binary(min_size=3073, max_size=3073),
    )

    def law(case):
        name, data = case
        images = sources.IMAGE_SETS[name]
        folder = tmp_path / images.folder
        folder.mkdir(parents=True, exist_ok=True)
        for file in images.files:
            (folder / file).write_bytes(data)
        assert lawful(lambda: compose([f"data={name}", f"data.root={tmp_path}"]).build("data").federation(3, 0)) is None

    each(cases, st.tuples(st.sampled_from(sorted(sources.IMAGE_SETS)), content), law)


def png(width, height, mode):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


@SIZES
def test_a_damaged_package_of_cifar_leaves_nothing(cases, tmp_path, monkeypatch):
    """Pictures, labels and archives as a registry might send them: nothing reaches data.root."""
    pictures = st.one_of(*(damaged(png(*size)) for size in ((8, 4, "RGB"), (4, 2, "L"))), st.binary(max_size=60))
    labels = st.one_of(
        st.sampled_from([b"[1, 2]", b"{}", b"[[1]]", b'["x"]', b"null", b"[" * 5000, b"1e999", b"[300]", b"\xff"]),
        st.binary(max_size=20),
    )
    member = st.tuples(
        st.sampled_from(["package/x", "../../x", "/tmp/x", "a/../../x", "package"]),
        st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE]),
    )

    def archive(members):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, kind in members:
                info = tarfile.TarInfo(name)
                info.type, info.linkname, info.size = kind, "../../x", 3 if kind == tarfile.REGTYPE else 0
                tar.addfile(info, io.BytesIO(b"abc"))
        return buffer.getvalue()

    archives = st.lists(member, max_size=3).map(archive)
    archives = st.one_of(archives, archives.flatmap(damaged))
    root = tmp_path / "deep" / "root"

    def law(case):
        picture, label, packed = case

        def fetch(temporary, made):
            for file in ("train_lables.json", "test_lables.json"):
                (temporary / file).write_bytes(label)
            for batch in sources.CIFAR_FILES:
                (temporary / batch.replace(".bin", ".png")).write_bytes(picture)
            sources._from_png(temporary, made)

        def unpack(temporary, made):
            (temporary / "x.tgz").write_bytes(packed)
            sources.unpack_archive(temporary / "x.tgz", temporary / "unpacked")
            raise DataError("no pictures in it")

        monkeypatch.setattr(sources, "_sources", lambda *rest: [("pictures", fetch), ("an archive", unpack)])
        assert lawful(lambda: sources.prepare("cifar10", str(root), say=lambda text: None)) is None
        assert not files_under(root)

    each(cases, st.tuples(pictures, labels, archives), law)
    assert files_under(tmp_path) == {"deep", "deep/root"}
