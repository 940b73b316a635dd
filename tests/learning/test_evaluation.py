"""Fine-tune-then-evaluate: by hand on quadratics, on training data only, and aggregated by hand."""

from __future__ import annotations

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from persafl_lit import compose, run
from persafl_lit.data import Digits
from persafl_lit.errors import ConfigError, DivergenceError
from persafl_lit.learning.scores import Measured, Point, Scores, accuracy_of, loss_of
from tests.support import reference
from tests.support.quadratics import random_quadratics, save

QUIET = ["tracking.enabled=false", "checkpoint.every=0"]
ETA = 0.02


def sgd(H, a, w):
    for _ in range(4):
        w = w - 0.05 * reference.plain(H, a, w)
    return w


RULES = {
    "none": ([], lambda H, a, w: w),
    "sgd": (["eval.finetune.steps=4", "eval.finetune.lr=0.05"], sgd),
    "maml": (["eval.finetune.alpha=0.07"], lambda H, a, w: w - 0.07 * reference.plain(H, a, w)),
    "prox": (
        ["eval.finetune.lam=3", "eval.finetune.inner_steps=6", "eval.finetune.lr=0.1"],
        lambda H, a, w: reference.moreau_steps(H, a, w, 3, 6, 0.1),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_personal_model_is_the_one_computed_by_hand(rule, tmp_path):
    """theta_i(w) for the final w, and its loss; the shared model's loss beside it."""
    H, a = random_quadratics(5, 4, seed=3)
    overrides, personalise = RULES[rule]
    result = run(
        [
            *QUIET,
            "data=quadratic",
            f"data.path={save(tmp_path / 'q.npz', H, a)}",
            "updates=9",
            f"eta={ETA}",
            f"eval.finetune={rule}",
            *overrides,
        ]
    )
    w = result.state_dict()["w"].numpy()
    for i, row in enumerate(result.clients()):
        theta = personalise(H[i], a[i], w)
        assert row["test_loss"] == pytest.approx(0.5 * (theta - a[i]) @ H[i] @ (theta - a[i]), abs=1e-10)
        assert row["global_loss"] == pytest.approx(0.5 * (w - a[i]) @ H[i] @ (w - a[i]), abs=1e-10)


@pytest.mark.parametrize("rule", ["sgd", "maml", "prox"])
def test_fine_tuning_sees_training_data_only_and_scores_are_of_the_right_split(rule):
    federation = Digits().federation(4, 0)
    rows = {
        split: {tuple(x.flatten().tolist()) for part in federation.parts for x in federation.inputs[part[split]]}
        for split in ("train", "val", "test")
    }
    seen: dict[bool, set] = {True: set(), False: set()}

    class Watching(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def forward(self, inputs):
            seen[self.training].update(tuple(x.flatten().tolist()) for x in inputs)
            return self.net(inputs)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

    result = run([*QUIET, "clients=4", "updates=3", f"eval.finetune={rule}"], model=Watching())
    assert seen[True] <= rows["train"]
    assert seen[False] <= rows["val"] | rows["test"]
    # The shared model's score, by hand, on the test split.
    model = result.model.eval()
    for client, row in enumerate(result.clients()):
        indices = federation.parts[client]["test"]
        hits = (model(federation.inputs[indices]).argmax(dim=1) == federation.labels[indices]).float().mean()
        assert row["global_accuracy"] == pytest.approx(float(hits))


def test_validation_and_test_scores_belong_to_their_splits():
    """Without fine-tuning and with the final model, each score is that of its own split, by hand."""
    result = run([*QUIET, "clients=5", "updates=20", "model=logistic", "eval.finetune=none"])
    federation = Digits().federation(5, 0)
    model = result.model.eval()
    for client, row in enumerate(result.clients()):
        for split in ("val", "test"):
            indices = federation.parts[client][split]
            with torch.no_grad():
                scores = model(federation.inputs[indices])
            labels = federation.labels[indices]
            assert row[f"{split}_accuracy"] == pytest.approx(float((scores.argmax(dim=1) == labels).float().mean()))
            assert row[f"{split}_loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, labels)), rel=1e-5)


def test_aggregates_by_hand():
    scores = [
        Scores(k, 1 + (k == 19), Measured(0.5, 0.01 * k, 0.5, 3.0 * k), Measured(0.1 * k, 0.05 * k, 1.0 * k, 2.0 * k))
        for k in range(20)
    ]
    accuracy, loss = accuracy_of(scores), loss_of(scores)
    assert accuracy["val"] == pytest.approx(0.95)
    assert accuracy["test"] == pytest.approx(0.475)
    assert accuracy["worst_decile"] == pytest.approx((0.0 + 0.05) / 2)
    assert accuracy["std"] == pytest.approx(0.05 * np.std(np.arange(20)))
    assert accuracy["global"] == pytest.approx(0.095)
    assert accuracy["median"] == pytest.approx(0.475)
    assert accuracy["weighted"] == pytest.approx((0.05 * sum(range(20)) + 0.95) / 21)
    assert accuracy["gap"] == pytest.approx((0.90 + 0.95) / 2 - (0.0 + 0.05) / 2)
    middle = {
        "val": 9.5,
        "test": 19.0,
        "global": 28.5,
        "median": 19.0,
        "std": 2 * np.std(np.arange(20)),
        "weighted": (2 * 190 + 38) / 21,
    }
    assert loss == pytest.approx(middle | {"worst_decile": (36 + 38) / 2, "gap": (36 + 38) / 2 - (0 + 2) / 2}), (
        "a high loss is a bad one"
    )


def test_further_rules_and_held_out_clients_are_measured_by_the_same_aggregates():
    """One client each, so that every mean is its own value."""
    shared, own, beside = (Measured(0.1 * k, 0.2 * k, 1.0 * k, 2.0 * k) for k in (1, 2, 3))
    trained, held_out = Scores(0, 5, shared, own, {"prox": beside}), Scores(1, 5, own, shared, {"prox": own})
    metrics = Point(1.0, 3, (trained,), {"grad_evals": 7}, (held_out,)).metrics()
    expected = {
        "accuracy.test": 0.4,
        "loss.test": 4.0,
        "prox.accuracy.test": 0.6,
        "prox.loss.val": 3.0,
        "accuracy.global": 0.2,
    }
    expected |= {
        "holdout.accuracy.test": 0.2,
        "holdout.loss.global": 4.0,
        "holdout.prox.accuracy.val": 0.2,
        "holdout.prox.loss.test": 4.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert len(metrics) == 2 * 2 * 2 * 8 + 1


def test_further_budgets_of_the_same_rule_equal_runs_that_are_evaluated_by_them():
    quick = [*QUIET, "method=fedasync", "model=logistic", "clients=5", "updates=20"]
    summary = run([*quick, "eval.beside=[none, sgd-1, sgd-30]"]).summary()
    for name, settings in {
        "sgd-1": ["eval.finetune.steps=1"],
        "sgd-30": ["eval.finetune.steps=30"],
        "none": ["eval.finetune=none"],
    }.items():
        alone = run([*quick, *settings]).summary()
        assert summary["beside"][name] == {**alone["accuracy"], "loss": alone["loss"]}
    with pytest.raises(ConfigError, match=r"unknown eval.beside 'sgd-'; there are none, sgd"):
        run([*quick, "eval.beside=[sgd-]"])
    with pytest.raises(ConfigError, match=r"steps must be > 0"):
        run([*quick, "eval.beside=[sgd-0]"])


def test_an_evaluation_that_diverges_is_said_not_reported_as_an_accuracy():
    with pytest.raises(DivergenceError, match="the evaluation after update 0 diverges: client 0"):
        run([*QUIET, "data=quadratic", "updates=5", "eval.finetune.lr=1e17", "eval.finetune.steps=20"])
    with pytest.raises(DivergenceError, match="diverges"):
        run(
            [
                *QUIET,
                "method=fedasync",
                "model=logistic",
                "clients=5",
                "updates=20",
                "method.beta=1e18",
                "eta=1e18",
                "eval.finetune=none",
            ]
        )


@pytest.mark.parametrize(
    ("method", "settings", "gradient"),
    [
        ("fedasync", [], lambda H, a, w: H @ (w - a)),
        ("persafl_maml", ["method.alpha=0.05"], lambda H, a, w: reference.maml(H, a, w, 0.05)),
        (
            "persafl_me",
            ["method.lam=20", "method.inner_steps=400"],
            lambda H, a, w: 20 * (w - np.linalg.solve(H + 20 * np.eye(len(w)), H @ a + 20 * w)),
        ),
    ],
)
def test_the_measured_gradient_is_that_of_the_methods_own_cost(method, settings, gradient):
    """|1/n sum_i grad F_i(w)|^2 at the first and the last model, against the closed forms; the same bits from any executor."""
    overrides = [
        *QUIET,
        "data=quadratic",
        "data.dimension=4",
        "clients=5",
        "updates=12",
        "precision=64",
        "eval.gradient=true",
        f"method={method}",
        *settings,
    ]
    result = run([*overrides, "executor=serial"])
    federation = compose(overrides).build("data").federation(5, 0)
    H, a = federation.H.numpy(), federation.a.numpy()
    for point, w in ((result.points[0], federation.w0.numpy()), (result.points[-1], result.model.w.detach().numpy())):
        mean = np.mean([gradient(H[client], a[client], w) for client in range(5)], axis=0)
        assert point.training["grad_norm_sq"] == pytest.approx(float(mean @ mean), rel=1e-9)
    assert run([*overrides, "workers=2"]).curves()["grad_norm_sq"] == result.curves()["grad_norm_sq"]
