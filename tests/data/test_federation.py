"""Federations: partitions are exact, draws are named, files are checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from persafl_lit.data import SPLITS, Digits, Quadratic
from persafl_lit.data.digits import read_digits
from persafl_lit.data.partition import PARTITIONS, Partition, Shares, split
from persafl_lit.data.pixels import Pixels
from persafl_lit.errors import ConfigError, DataError
from tests.support.quadratics import random_quadratics, save


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(PARTITIONS)),
    clients=st.integers(1, 40),
    c=st.integers(1, 10),
    imbalance=st.floats(0, 1.5),
    concentration=st.floats(0.3, 50),
    seed=st.integers(0, 10_000),
)
def test_no_sample_is_in_two_places_and_none_is_lost(kind, clients, c, imbalance, concentration, seed):
    check_exact(
        Partition(kind, c, concentration, imbalance), np.random.default_rng(seed).integers(10, size=1500), clients, seed
    )


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(sorted(PARTITIONS)),
    clients=st.integers(41, 1000) | st.just(1000),
    c=st.integers(1, 10),
    imbalance=st.floats(0, 1.5),
    concentration=st.floats(1.0, 50),
    seed=st.integers(0, 10_000),
)
def test_a_thousand_clients_are_dealt_as_exactly(kind, clients, c, imbalance, concentration, seed):
    check_exact(
        Partition(kind, c, concentration, imbalance),
        np.random.default_rng(seed).integers(10, size=70_000),
        clients,
        seed,
    )


def check_exact(settings, labels, clients, seed):
    """No sample in two clients or two splits; only classes that nobody holds are left over, and that is said."""
    try:
        parts = settings.deal(labels, clients, seed)
    except DataError as error:
        assert "lower" in str(error)
        return
    shares = Shares(labels, [split(part, labels, settings, client, seed) for client, part in enumerate(parts)])
    pieces = [piece for part in shares.parts for piece in part]
    assert len(shares.parts) == clients
    assert all(len(piece) for piece in pieces), "train, val and test of every client"
    dealt = np.concatenate(pieces)
    assert len(np.unique(dealt)) == len(dealt)
    held = np.unique(labels[dealt]) if settings.partition == "classes" else np.unique(labels)
    assert sorted(dealt) == np.flatnonzero(np.isin(labels, held)).tolist(), (
        "only classes that nobody holds are left over"
    )
    left = len(labels) - len(dealt)
    assert shares.notes == (
        (f"{left} of {len(labels)} samples belong to classes that no client holds",) if left else ()
    )
    assert shares.sizes().sum() == shares.label_counts().sum() == len(dealt)
    if settings.partition == "classes":
        assert ((shares.label_counts() > 0).sum(axis=1) == settings.classes_per_client).all()


def test_every_split_follows_the_clients_own_distribution():
    federation = Digits(classes_per_client=3).federation(20, seed=1)
    for part in federation.parts:
        train, val, test = (set(federation.labels[part[name]].tolist()) for name in SPLITS)
        assert len(train) == 3
        assert val <= train
        assert test <= train


def test_sizes_are_unbalanced_as_configured():
    even, uneven = (Digits(imbalance=value).federation(30, 0).sizes().sum(axis=1) for value in (0.0, 1.0))
    assert uneven.std() / uneven.mean() > 3 * even.std() / even.mean()
    assert even.sum() == uneven.sum() == 1797


def test_classes_that_nobody_holds_are_reported():
    federation = Digits(classes_per_client=2).federation(3, 0)
    left = 1797 - federation.sizes().sum()
    assert left > 0
    assert federation.notes == (f"{left} of 1797 samples belong to classes that no client holds",)


def test_digits_are_scikit_learns():
    digits = load_digits()
    table = read_digits()
    assert (table[:, :-1] == digits.data).all()
    assert (table[:, -1] == digits.target).all()


def test_digits_are_the_real_ones():
    federation = Digits().federation(30, 0)
    assert federation.shape == (1, 8, 8)
    assert torch.bincount(federation.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_batches_are_named_not_ordered():
    federation = Digits().federation(10, 0)

    def draw(*arguments):
        return [batch.data[0] for batch in federation.batches(*arguments, steps=4, size=8, seed=3)]

    first = draw(2, "D", 5)
    draw(7, "D", 1)
    assert all(torch.equal(one, two) for one, two in zip(first, draw(2, "D", 5), strict=True))
    for other in ((3, "D", 5), (2, "D'", 5), (2, "D", 6)):
        assert not all(torch.equal(one, two) for one, two in zip(first, draw(*other), strict=True))


def test_a_batch_holds_distinct_samples_and_a_small_client_gives_all_it_has():
    federation = Digits().federation(30, 0)
    held = len(federation.parts[0]["train"])
    for size in (5, held, 10 * held):
        for batch in federation.batches(0, "D", 0, steps=3, size=size, seed=0):
            rows = {tuple(row.flatten().tolist()) for row in batch.data[0]}
            assert len(batch.data[1]) == min(size, held)
            assert len(rows) >= min(size, held) - 1, "digits holds a pair of equal images at most"


def test_batches_come_from_the_clients_training_split_only():
    federation = Digits().federation(30, 0)
    train = {tuple(row.flatten().tolist()) for row in federation.inputs[federation.parts[4]["train"]]}
    for batch in federation.batches(4, "D", 0, steps=50, size=10, seed=0):
        assert {tuple(row.flatten().tolist()) for row in batch.data[0]} <= train


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (
            lambda: Digits(classes_per_client=11).federation(5, 0),
            ConfigError,
            "classes_per_client=11, but the data has 10 classes",
        ),
        (lambda: Digits().federation(2000, 0), DataError, "2000 clients need at least 3 samples each"),
        (lambda: Digits(classes_per_client=10).federation(500, 0), DataError, "lower clients"),
        (
            lambda: Digits(partition="dirichlet", concentration=0.001).federation(300, 0),
            DataError,
            "raise data.concentration",
        ),
        (lambda: Digits(partition="stars"), ConfigError, "data.partition must be one of"),
        (lambda: Digits(classes_per_client=0), ConfigError, "data.classes_per_client"),
        (lambda: Digits(concentration=0.0), ConfigError, "data.concentration"),
        (lambda: Digits(imbalance=-1.0), ConfigError, "data.imbalance"),
        (lambda: Digits(val_share=0.6, test_share=0.5), ConfigError, "stay below 1"),
        (lambda: Digits(test_share=0.0), ConfigError, "data.test_share"),
        (lambda: Quadratic(dimension=0), ConfigError, "data.dimension"),
        (lambda: Quadratic(condition=0.5), ConfigError, "data.condition"),
        (lambda: Quadratic(noise=-1.0), ConfigError, "data.noise"),
    ],
)
def test_what_cannot_be_dealt_is_refused(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()


# -- quadratics -------------------------------------------------------------------------------------------------------


def test_an_npz_gives_its_numbers(tmp_path):
    H, a = random_quadratics(4, 3)
    federation = Quadratic(path=save(tmp_path / "q.npz", H, a)).federation(None, 0)
    assert federation.clients == 4
    np.testing.assert_array_equal(federation.H.numpy(), H)
    np.testing.assert_array_equal(federation.a.numpy(), a)
    assert not federation.w0.any()
    assert federation.smoothness == pytest.approx(max(np.linalg.eigvalsh(h).max() for h in H))


def test_generated_quadratics_have_the_condition_asked_for():
    federation = Quadratic(condition=100.0, dimension=6).federation(20, 0)
    eigenvalues = torch.linalg.eigvalsh(federation.H)
    assert eigenvalues.min() >= 1 - 1e-9
    assert eigenvalues.max() <= 100 + 1e-9
    assert federation.clients == 20


def test_gradient_noise_has_the_sigma_asked_for():
    federation = Quadratic(noise=0.5).federation(3, 0)
    draws = torch.stack([batch.data[2] for batch in federation.batches(1, "D", 0, steps=2000, size=1, seed=0)])
    assert float(draws.std()) == pytest.approx(0.5, rel=0.05)
    assert abs(float(draws.mean())) < 0.02


H2, A2 = random_quadratics(2, 3)
ASYMMETRIC = H2 + np.triu(np.ones((3, 3)), 1)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"H": H2}, "no array 'a'"),
        ({"a": A2}, "no array 'H'"),
        ({"H": H2, "a": A2[0]}, r"a must have the shape \(n, d\)"),
        ({"H": H2[:, :2], "a": A2}, r"H must have the shape \(2, 3, 3\)"),
        ({"H": H2, "a": A2, "w0": np.zeros(4)}, r"w0 must have the shape \(3,\)"),
        ({"H": H2 * np.nan, "a": A2}, "not finite"),
        ({"H": ASYMMETRIC, "a": A2}, "symmetric"),
        ({"H": np.array([[None]]), "a": A2}, "cannot read"),
        ({"H": np.array([["x"]]), "a": A2}, "cannot read"),
    ],
)
def test_an_npz_with_wrong_contents_is_refused(arrays, sentence, tmp_path):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=sentence):
        Quadratic(path=str(tmp_path / "bad.npz")).federation(None, 0)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        Quadratic(path=str(tmp_path / "none.npz")).federation(None, 0)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match="cannot read"):
        Quadratic(path=str(tmp_path / "text.npz")).federation(None, 0)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(DataError, match="cannot read"):
        Quadratic(path=str(tmp_path / "array.npy")).federation(None, 0)


def test_an_npz_and_another_number_of_clients_do_not_go_together(tmp_path):
    path = save(tmp_path / "q.npz", H2, A2)
    with pytest.raises(ConfigError, match="clients=5, but .* holds 2 clients"):
        Quadratic(path=path).federation(5, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pixels_are_normalised_to_rounding(dtype):
    """Every byte, in two pieces and three channels, wanted in any order: (x / 255 - mean) / std, rounded about once."""
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    images = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).expand(256, 3, 2, 2)
    wanted = torch.tensor([255, 0, 99, 100, 7, 7, *range(256)])
    ours = Pixels((images[:100], images[100:]), mean, std, dtype)[wanted]
    channels = [torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (mean, std)]
    expected = (images[wanted].double() / 255 - channels[0]) / channels[1]
    assert ours.dtype is dtype
    torch.testing.assert_close(
        ours.double(),
        expected,
        rtol=torch.finfo(dtype).eps,
        atol=4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps,
    )
