"""Data of users': every kind that `run(data=...)` and the command line take, to the same bits however it is read."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.transforms import v2

import persafl_lit
from persafl_lit import Augmented, Federation, compose, run
from persafl_lit.cli import main
from persafl_lit.data import SPLITS, Samples, Synthetic
from persafl_lit.data.adapters import adapt
from persafl_lit.data.augmented import has_random_transform, without_random
from persafl_lit.data.custom import CustomData
from persafl_lit.data.indexed import Indexed
from persafl_lit.errors import CheckpointError, ConfigError, DataError, DivergenceError, Interrupted
from persafl_lit.learning.evaluation import measure
from persafl_lit.learning.flat_loss import FlatLoss
from tests.support.gates import CALLBACK, Gate
from tests.support.runs import Stopper, bits

ROOT = Path(__file__).parent.parent.parent
QUIET = ["tracking.enabled=false", "checkpoint.every=0"]
SMALL = [*QUIET, "model=mlp", "model.hidden=[8]", "updates=12", "local_steps=2", "method=fedasync", "eval.every=2.0"]
BY_INDEX = ["data=custom", "model=mlp", "data.in_memory=0"]
SERIAL, TWO = ["executor=serial"], ["executor=processes", "workers=2"]


class Plain(Dataset):
    """Vectors whose first number is the label, so that a batch shows whose it is."""

    def __init__(self, samples=30, seed=0, width=5, classes=3):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, width, generator=generator)
        self.y = torch.arange(samples) % classes
        self.x[:, 0] = self.y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


class Noisy(Plain):
    """A random transform that draws from all three generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(len(x)) + random.random() + float(np.random.rand()), y


def six(cls=Plain, **more):
    return [cls(20 + client, client, **more) for client in range(6)]


def settings(**more):
    return CustomData(path="x", **more)


def made(data, clients=None, seed=0, **more):
    return adapt(data, settings(**more), clients, seed)


def held(federation):
    """Of each client and split, the samples as numbers."""
    return [
        {split: [row for data, _ in federation.whole(client, split, 7) for row in data[0].tolist()] for split in SPLITS}
        for client in range(federation.clients)
    ]


# -- kinds of data ----------------------------------------------------------------------------------------------------


class Module(L.LightningDataModule):
    def __init__(self, seed, collate=None):
        super().__init__()
        self.seed, self.collate = seed, collate

    def setup(self, stage):
        self.whole = Plain(30, self.seed)

    def _loader(self, start, end):
        return DataLoader(Subset(self.whole, range(start, end)), batch_size=3, collate_fn=self.collate)

    def train_dataloader(self):
        return self._loader(0, 20)

    def val_dataloader(self):
        return self._loader(20, 25)

    def test_dataloader(self):
        return self._loader(25, 30)


def pieces(seed):
    return tuple(Subset(Plain(30, seed), range(*ends)) for ends in ((0, 20), (20, 25), (25, 30)))


@pytest.mark.parametrize(
    "data",
    [
        [Module(seed) for seed in range(4)],
        [pieces(seed) for seed in range(4)],
        [dict(zip(SPLITS, pieces(seed), strict=True)) for seed in range(4)],
    ],
    ids=["modules", "tuples", "dicts"],
)
def test_splits_that_are_given_are_kept(data):
    federation = made(data)
    assert isinstance(federation, Samples)
    assert federation.sizes().tolist() == [[20, 5, 5]] * 4
    for client, found in enumerate(held(federation)):
        rows = Plain(30, client).x.tolist()
        assert (found["train"], found["val"], found["test"]) == (rows[:20], rows[20:25], rows[25:])


def test_one_dataset_per_client_is_split_by_the_shares_class_by_class():
    federation = made([Plain(100, client, classes=4) for client in range(3)], val_share=0.1, test_share=0.4)
    assert federation.sizes().tolist() == [[50, 10, 40]] * 3
    for client, found in enumerate(held(federation)):
        together = sorted(row for rows in found.values() for row in rows)
        assert together == sorted(Plain(100, client, classes=4).x.tolist()), "each sample once"
        assert np.bincount([int(row[0]) for row in found["test"]]).tolist() == [10] * 4, "stratified"


def test_a_split_that_is_missing_is_set_aside_from_training():
    train, _, test = pieces(0)
    federation = made([{"train": train, "test": test}, {"train": train, "val": test}], val_share=0.25, test_share=0.4)
    assert federation.sizes().tolist() == [[15, 5, 5], [12, 5, 8]]


def test_arrays_are_dealt_by_a_partition_of_ours():
    whole = Plain(300)
    for data in (
        (whole.x, whole.y),
        (whole.x.numpy(), whole.y.numpy()),
        {"x": whole.x, "y": whole.y},
        whole,
        TensorDataset(whole.x, whole.y),
    ):
        federation = made(data, 5, partition="classes", classes_per_client=2)
        assert federation.clients == 5
        for found in held(federation):
            assert len({row[0] for rows in found.values() for row in rows}) == 2


def test_the_client_of_each_sample_decides_who_holds_it():
    whole, client = Plain(90), np.array(["anna", "bert", "cleo"])[np.arange(90) % 3]
    whole.clients = client
    for data in (
        (whole.x, whole.y, client),
        (Plain(90), client),
        whole,
        {"x": whole.x, "y": whole.y, "client": client},
    ):
        federation = made(data)
        for number, found in enumerate(held(federation)):
            together = sorted(row for rows in found.values() for row in rows)
            assert together == sorted(whole.x[number::3].tolist())


def test_a_split_column_is_kept():
    whole, split = Plain(90), np.array(["train", "train", "val", "test", "train"])[np.arange(90) % 5]
    federation = made({"x": whole.x, "y": whole.y, "client": np.arange(90) // 30, "split": split})
    assert federation.sizes().tolist() == [[18, 6, 6]] * 3


def test_a_list_fixes_the_number_of_clients():
    result = run([*SMALL, "clients=4"], data=six())
    assert result.federation.clients == len(result.clients()) == 6
    assert result.config.clients is None
    assert result.summary()["config"]["data"]["path"] == "list of 6: tests.data.test_own_data.Plain"
    assert "custom" in result.config.label()


def test_the_settings_of_the_deal_are_the_configs():
    whole = Plain(300)
    result = run(
        [
            *SMALL,
            "clients=4",
            "data.partition=iid",
            "data.imbalance=0",
            "data.test_share=0.5",
            "data.holdout_clients=1",
        ],
        data=whole,
    )
    assert result.federation.sizes()[:, 2].tolist() == [38] * 4, "half of 75"
    assert result.summary()["holdout"]["clients"] == 1


class TwoPoints(Federation):
    """A user's own: each client has one number to learn."""

    clients = 2

    def batches(self, client, purpose, visit, steps, size, seed):
        from persafl_lit.data import Batch

        return [Batch(torch.tensor([float(client)]), 0)] * steps

    def whole(self, client, split, size):
        yield torch.tensor([float(client)]), 1

    def to(self, device, dtype):
        return self

    def sizes(self):
        return np.ones((2, 3), int)

    def count(self, client, split):
        return 1

    def digest(self):
        return "two points"


class Number(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return (self.w - batch).square().sum()


def test_a_federation_of_the_users_own_trains_a_model_of_the_users_own():
    result = run(
        [*QUIET, "updates=200", "eta=0.05", "method=fedasync", "eval.finetune=none"], Number(), data=TwoPoints()
    )
    assert result.model.w.item() == pytest.approx(0.5, abs=0.3)
    assert np.isnan(result.accuracy["test"])
    with pytest.raises(ConfigError, match="model=mlp needs samples of one shape"):
        run(SMALL, data=TwoPoints())


# -- the same bits however it is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedasync", "persafl_maml"])
def test_reading_by_index_and_from_memory_give_the_same_bits(method):
    images = [
        TensorDataset(torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(k)), torch.arange(20) % 3)
        for k in range(4)
    ]
    overrides = [
        "model=cnn2",
        "model.channels=[2,2]",
        *QUIET,
        "updates=8",
        "local_steps=2",
        f"method={method}",
        "eval.beside=[maml]",
    ]
    memory = run([*overrides, *SERIAL], data=images)
    index = run(["data=custom", "data.in_memory=0", *overrides, *SERIAL], data=images)
    assert isinstance(memory.federation, Samples)
    assert isinstance(index.federation, Indexed)
    assert bits(memory) == bits(index)


@pytest.mark.parametrize("cls", [Plain, Noisy])
def test_the_number_of_workers_changes_no_bit_and_neither_does_resuming(cls):
    overrides = [*BY_INDEX, *SMALL, "updates=20", "checkpoint.every=3"]
    whole = run([*overrides, *SERIAL], data=six(cls))
    assert isinstance(whole.federation, Indexed)
    assert bits(run([*overrides, *TWO], data=six(cls))) == bits(whole)
    stop = Stopper(7)
    with pytest.raises(Interrupted):
        run([*overrides, *TWO], data=six(cls), callbacks=[stop], should_stop=stop)
    assert bits(run([*overrides, *TWO], data=six(cls), resume=True)) == bits(whole)


def test_random_transforms_are_named_not_ordered():
    federation = made(six(Noisy))

    def draw(*arguments):
        return torch.cat([batch.data[0] for batch in federation.batches(*arguments, steps=3, size=4, seed=3)])

    first = draw(2, "D", 5)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert not torch.equal(first, draw(2, "D", 6))
    assert torch.equal(first, draw(2, "D", 5))
    assert torch.equal(state[0], torch.get_rng_state())
    assert (state[1], state[2]) == (random.getstate(), np.random.get_state()[1].tolist()), (
        "nobody else's generators move"
    )


def test_a_small_client_gets_other_random_transforms_in_every_step():
    federation = made([Noisy(5)])
    one, two = (batch.data[0] for batch in federation.batches(0, "D", 0, steps=2, size=50, seed=0))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("more", [[], BY_INDEX], ids=["memory", "index"])
def test_other_data_is_not_resumed(more):
    overrides, stop = [*more, *SMALL, "updates=20", "checkpoint.every=3", *SERIAL], Stopper(7)
    with pytest.raises(Interrupted):
        run(overrides, data=six(), callbacks=[stop], should_stop=stop)
    other = six()
    other[3].x[7, 2] += 1
    with pytest.raises(CheckpointError, match=r"belongs to another run \(config, data,"):
        run(overrides, data=other, resume=True)
    run(overrides, data=six(), resume=True)


KILLED = """
import torch
from torch.utils.data import Dataset

class Jittered(Dataset):
    def __init__(self, client):
        generator = torch.Generator().manual_seed(client)
        self.x, self.y = torch.randn(40, 6, generator=generator), torch.arange(40) % 4
    def __len__(self):
        return len(self.y)
    def __getitem__(self, index):
        return self.x[index] + 0.3 * torch.randn(6), int(self.y[index])

def clients(count=5):
    return [Jittered(client) for client in range(count)]
"""


@pytest.mark.slow
def test_a_killed_run_on_random_transforms_goes_on_to_the_same_bits(tmp_path):
    (tmp_path / "mine.py").write_text(KILLED)
    overrides = [
        "data=custom",
        "data.path=mine.clients",
        "allow_code=true",
        "model.hidden=[8]",
        "tracking.enabled=false",
        "method=fedasync",
    ]
    command = [
        sys.executable,
        "-m",
        "persafl_lit",
        "run",
        *overrides,
        *CALLBACK,
        "updates=60",
        "checkpoint.every=10",
        *TWO,
        "--save-model",
        "model.pt",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    gate = Gate(tmp_path / "gate", checkpoints=2)
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment | gate.environment,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    gate.reached(process)
    process.kill()
    process.wait()
    done = subprocess.run(
        [*command, "--resume"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "resuming after update" in done.stderr
    resumed = torch.load(tmp_path / "model.pt", weights_only=True)
    undisturbed = run([*overrides, "updates=60", *SERIAL]).state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())


class InFile(Dataset):
    """Rows of a file that is kept open: its position is shared by whoever inherits the handle."""

    def __init__(self, path):
        self.path, self.file = path, open(path, "rb")  # noqa: SIM115

    def __len__(self):
        return os.path.getsize(self.path) // 24

    def __getitem__(self, index):
        self.file.seek(24 * index)
        time.sleep(0.0002)  # long enough for another process to move the position
        row = np.frombuffer(self.file.read(24), np.float32)
        assert row[1] == index, "somebody else has moved the position"
        return torch.from_numpy(row.copy()) / 40, int(row[0])


class Reopened(InFile):
    def __getstate__(self):
        return self.path

    def __setstate__(self, path):
        self.__init__(path)


def rows_file(path, samples=40):
    rows = np.random.default_rng(0).normal(size=(samples, 6)).astype(np.float32)
    rows[:, 0], rows[:, 1] = np.arange(samples) % 3, np.arange(samples)
    path.write_bytes(rows.tobytes())
    return path


def test_workers_never_share_an_open_file(tmp_path):
    path = rows_file(tmp_path / "rows.bin")
    one = Reopened(path)
    overrides = [*BY_INDEX, *SMALL, "updates=16", "clients=4", "data.partition=iid", "batch_size=4"]
    whole = bits(run([*overrides, *SERIAL], data=one))
    assert bits(run([*overrides, "executor=processes", "workers=2"], data=one)) == whole
    held_open = InFile(path)
    assert bits(run([*overrides, *SERIAL], data=held_open))[0] == whole[0]
    with pytest.raises(
        DataError, match="the data: the InFile cannot be pickled .*BufferedReader.* or use executor=serial"
    ):
        run([*overrides, *TWO], data=held_open)
    closure = Augmented(Reopened(path), (lambda file: lambda x: x + len(file.name))(held_open.file))
    with pytest.raises(DataError, match="holds an open file"):
        run([*overrides, *TWO], data=closure)


def test_arrays_and_functions_are_shared_with_forked_workers_and_need_no_name():
    class Local(Plain):
        transform = staticmethod(lambda x: x * 2)

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return self.transform(x), y

    overrides = [*BY_INDEX, *SMALL]
    assert bits(run([*overrides, *TWO], data=six(Local))) == bits(run([*overrides, *SERIAL], data=six(Local)))


def test_data_that_is_read_by_index_can_be_sent_to_processes_that_are_not_forked(tmp_path):
    federation = made(Reopened(rows_file(tmp_path / "rows.bin")), 3, partition="iid", in_memory=0.0)
    sent = pickle.loads(pickle.dumps(federation))
    assert sent.digest() == federation.digest()
    ours, theirs = (found.batches(1, "D", 2, 3, 4, 5) for found in (federation, sent))
    assert all(torch.equal(one.data[0], two.data[0]) for one, two in zip(ours, theirs, strict=True))


# -- random transforms and evaluation ---------------------------------------------------------------------------------


class Pictures(Dataset):
    def __init__(self, seed=0, transform=None):
        self.images = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.transform, self.targets = transform, (torch.arange(24) % 3).tolist()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.targets[index]


FLIP = v2.RandomHorizontalFlip()


@pytest.mark.parametrize(
    "data",
    [
        lambda seed: Augmented(Pictures(seed), FLIP),
        lambda seed: Pictures(seed, FLIP),
        lambda seed: Pictures(seed, v2.Compose([v2.RandomCrop(8, padding=1), FLIP])),
        lambda seed: Subset(Pictures(seed, v2.Compose([FLIP])), range(24)),
    ],
)
def test_evaluation_reads_samples_without_random_transforms(data):
    federation = made([data(seed) for seed in range(3)])
    assert isinstance(federation, Indexed)
    assert federation.augmented
    assert not federation.notes
    for client, found in enumerate(held(federation)):
        assert all(row in Pictures(client).images.tolist() for rows in found.values() for row in rows)
    drawn = torch.cat([batch.data[0] for batch in federation.batches(0, "D", 0, 20, 8, 0)])
    assert not all(row in Pictures(0).images.tolist() for row in drawn.tolist()), "training sees them"


def test_a_random_transform_that_cannot_be_taken_away_is_the_same_every_time_and_said():
    federation = made(six(Noisy))
    assert held(federation) == held(federation)
    assert "evaluation reads samples with the random transforms of 6 of 6 Datasets" in federation.notes[0]
    resized = made([Pictures(0, v2.RandomResizedCrop(5))])
    assert resized.notes, "without it, samples would have another shape"


def test_the_test_datasets_own_transforms_are_kept():
    entry = (Pictures(0, FLIP), Pictures(1, lambda image: image + 100), Pictures(2, lambda image: image - 100))
    federation = made([entry])
    assert not federation.notes
    (found,) = held(federation)
    assert torch.tensor(found["val"]).mean() > 90
    assert torch.tensor(found["test"]).mean() < -90


def test_randomness_that_no_seed_repeats_is_refused():
    class Wild(Plain):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] + float(np.random.default_rng().random()), 0

    with pytest.raises(DataError, match="client 0: sample 0 is another each time it is read"):
        made([Wild()])


def test_transforms_are_recognised():
    assert has_random_transform(Pictures(0, v2.Compose([v2.Compose([v2.ColorJitter()])])))
    assert not has_random_transform(Pictures(0, v2.Normalize([0.5], [0.5])))
    normalise = v2.Normalize([0.5], [0.5])
    left = without_random(Pictures(0, v2.Compose([FLIP, normalise])))
    assert left.transform.transforms == [normalise]


# -- dtypes, trees and tasks ------------------------------------------------------------------------------------------


class Tagger(L.LightningModule):
    """Scores for each token, last or second as torch's cross-entropy takes them."""

    def __init__(self, last=True):
        super().__init__()
        self.embed, self.last = nn.Embedding(11, 7), last
        self.out = nn.Linear(7, 5)

    def forward(self, ids):
        assert ids.dtype is torch.int64, "token ids stay integers"
        scores = self.out(self.embed(ids))
        return scores if self.last else scores.movedim(-1, 1)

    def training_step(self, batch, batch_idx):
        scores = self(batch[0])
        return nn.functional.cross_entropy(scores.movedim(-1, 1) if self.last else scores, batch[1])


def sentences(client, samples=30, length=6):
    generator = torch.Generator().manual_seed(client)
    ids = torch.randint(11, (samples, length), generator=generator)
    return TensorDataset(ids, ids % 5)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("more", [[], BY_INDEX], ids=["memory", "index"])
def test_token_ids_stay_integers_and_token_accuracy_is_a_share(last, more):
    data = [sentences(client) for client in range(4)]
    result = run([*more, *QUIET, "method=fedasync", "updates=150", "eta=1.0", "precision=64"], Tagger(last), data=data)
    assert result.federation.task == "tokens"
    assert 0.5 < result.accuracy["test"] <= 1
    result.model.float()
    federation = made(data)
    f = FlatLoss(result.model)
    f.backbone.eval()
    ids, labels = next(federation.whole(1, "test", 100))[0]
    expected = float((f.backbone(ids).argmax(-1 if last else 1) == labels).float().mean())
    assert measure(f, federation, 1, "test", f.point)[1] == pytest.approx(expected)


def test_tokens_that_are_not_counted_are_not():
    ids = torch.arange(40).reshape(10, 4) % 11
    labels = torch.where(torch.arange(4) < 1, ids % 5, torch.tensor(-100))
    model = Tagger()
    with torch.no_grad():
        model.out.weight.zero_()
        model.out.bias.copy_(torch.tensor([0.0, 0, 1, 0, 0]))  # always 2
    federation = made([TensorDataset(ids, labels)])
    test = next(federation.whole(0, "test", 100))[0][1][:, 0]
    f = FlatLoss(model)
    assert measure(f, federation, 0, "test", f.point)[1] == pytest.approx(float((test == 2).float().mean()))


def test_a_sequential_network_learns_tokens_too():
    network = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 5))
    result = run(
        [*QUIET, "method=fedasync", "updates=150", "eta=1.0"], network, data=[sentences(client) for client in range(4)]
    )
    assert 0.5 < result.accuracy["test"] <= 1


@pytest.mark.parametrize("network", [None, nn.Sequential(nn.Linear(5, 1))])
def test_numbers_are_learnt_with_the_squared_error(network):
    clients = [Plain(40, client) for client in range(4)]
    data = [TensorDataset(one.x, one.x.sum(1)) for one in clients]
    overrides = [*QUIET, "method=fedasync", "updates=150", "eta=0.02", *(["model=logistic"] if network is None else [])]
    result = run(overrides, network, data=data)
    assert np.isnan(result.accuracy["test"])
    assert result.points[-1].loss()["test"] < 0.1 * result.points[0].loss()["global"]
    assert result.summary()["accuracy"]["test"] is None


class Pair(L.LightningModule):
    """Inputs are a dict of features and ids."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(4, 3), nn.Linear(8, 3)

    def forward(self, inputs):
        assert inputs["id"].dtype is torch.int32
        assert inputs["x"].dtype is self.out.weight.dtype
        return self.out(torch.cat([inputs["x"], self.embed(inputs["id"])], 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Dicts(Plain):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x.double(), "id": torch.tensor(index % 4, dtype=torch.int32)}, y


def test_nested_inputs_keep_their_types_in_memory_and_by_index():
    overrides = [*QUIET, "method=fedasync", "updates=30", "eta=0.1"]
    model = Pair()
    memory = run([*overrides, *TWO], model, data=six(Dicts))
    index = run(["data=custom", "data.in_memory=0", *overrides, *SERIAL], model, data=six(Dicts))
    assert isinstance(memory.federation, Samples)
    assert bits(memory) == bits(index)
    assert memory.accuracy["test"] > 0.4


class Ragged(Dataset):
    """Sentences of different lengths."""

    def __init__(self, seed):
        generator = np.random.default_rng(seed)
        self.texts = [torch.from_numpy(generator.integers(1, 11, size=generator.integers(2, 9))) for _ in range(30)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], self.texts[index] % 5


def padded(samples):
    pad = nn.utils.rnn.pad_sequence
    return pad([x for x, _ in samples], batch_first=True), pad(
        [y for _, y in samples], batch_first=True, padding_value=-100
    )


def test_a_collate_function_makes_batches_of_what_has_no_one_shape():
    data = [{"train": Ragged(client), "collate_fn": padded} for client in range(4)]
    overrides = [*QUIET, "method=fedasync", "updates=150", "eta=1.0"]
    torch.manual_seed(0)
    model = Tagger()
    result = run([*overrides, *TWO], model, data=data)
    assert 0.5 < result.accuracy["test"] <= 1
    assert bits(run([*overrides, *SERIAL], model, data=data)) == bits(result)
    with pytest.raises(DataError, match="client 0: sample 1 is .* sample 0 .* collate_fn"):
        run(overrides, model, data=[Ragged(0)])


def test_a_data_modules_collate_function_is_used():
    federation = made(
        [
            Module(
                0,
                collate=lambda samples: (
                    torch.stack([x for x, _ in samples]) + 5,
                    torch.tensor([y for _, y in samples]),
                ),
            )
        ]
    )
    assert isinstance(federation, Indexed)
    assert torch.tensor(held(federation)[0]["test"])[:, 0].min() >= 5


# -- errors -----------------------------------------------------------------------------------------------------------


class Raises(Plain):
    def __init__(self, error=ValueError, at=17):
        super().__init__()
        self.error, self.at = error, at

    def __getitem__(self, index):
        if index == self.at:
            raise self.error("no such row")
        return super().__getitem__(index)


class Streamed(IterableDataset):
    def __iter__(self):
        yield from ()


class Broken(Module):
    def setup(self, stage):
        sys.exit(3)


X, Y = torch.randn(30, 4), torch.arange(30) % 3


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            [Plain(), Plain(width=6)],
            r"clients of different shapes: samples of client 1 are float32 \(6,\), those of client 0 float32 \(5,\)",
        ),
        ([Plain(), Plain(0)], "client 1 has no samples"),
        ([Plain(), Plain(2)], "client 1 has 2 samples, fewer than the 3"),
        ([Plain(), (Plain(), Plain(0), Plain())], "client 1, val has no samples"),
        ([Plain(), Raises()], r"client 1: the Raises raises at index 17: ValueError: no such row \(test_own_data.py"),
        ([Plain(), Raises(SystemExit)], "client 1: the Raises raises at index 17: SystemExit"),
        ([], "data= is an empty list"),
        ([Plain(), "mnist"], "client 1: 'mnist' is no data; data= takes a list with one entry per client"),
        ("mnist", "the data: 'mnist' is no data"),
        ([X, Y], "client 0: tensor.* is no data"),
        ([{"training": Plain()}], "client 0: a dict has the keys train, val and test"),
        ({"x": X}, "a dict of arrays has x, y"),
        ([Streamed()], "client 0: Streamed is an IterableDataset"),
        ([Broken(0)], "client 0: the Broken fails: SystemExit: 3"),
        ((X, Y[:7]), "x has 30 rows and y has 7; they need"),
        ((X, np.array(["a"] * 30)), "the data: y must be numbers; got an array of <U1"),
        ((X, Y, np.zeros(29, int)), "client must be a whole number or a text for each of the 30 samples"),
        ((X, -Y), "the data: sample 1 has the label -1; labels are whole numbers from 0 on"),
        ((X, Y.float() / 0), "the data: sample 0 has a target that is not finite"),
        ({"x": X, "y": Y, "split": np.array(["train"] * 29 + ["tset"])}, "sample 29 has 'tset'"),
        ({"x": X, "y": Y, "client": Y, "split": np.where(Y == 1, 0, Y)}, "client 0 has no samples for test"),
        ([TensorDataset(X, Y), TensorDataset(X, Y.float())], "clients of different targets"),
        (
            [Pictures(0, lambda image: Image.new("L", (3, 3)))],
            "client 0: sample 0 holds a Image, of which no batch can be made",
        ),
        ([[1, 2, 3]], r"client 0: \[1, 2, 3\] is no data"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(data, sentence):
    with pytest.raises(DataError, match=sentence):
        made(data, None)


def test_labels_outside_the_range_are_refused_by_name():
    with pytest.raises(DataError, match="client 1: sample 2 has the label 2; data.classes=2 allows 0 to 1"):
        made([Plain(classes=2), Plain()], classes=2)


def test_a_dataset_that_fails_while_a_run_reads_it_is_named():
    class Worn(Plain):
        """Fails once it is trained on."""

        targets = property(lambda self: self.y)

        def __getitem__(self, index):
            if torch.is_grad_enabled() and torch.initial_seed() not in (0, 1, 2):
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    for executor in (SERIAL, TWO):
        with pytest.raises(DataError, match=r"client \d: the Worn raises at index \d+: OSError: the disk is gone"):
            run([*BY_INDEX, *SMALL, *executor], data=six(Worn))


@pytest.mark.parametrize("where", [[], ["data.in_memory=0"]], ids=["in memory", "by index"])
@pytest.mark.parametrize("executor", [SERIAL, TWO], ids=["serial", "2 workers"])
def test_a_value_that_is_not_finite_is_named_and_not_taken_for_divergence(where, executor):
    spoilt = X.clone()
    spoilt[17, 2] = math.nan
    overrides = ["data=custom", "model=mlp", *where, *SMALL, *executor]
    with pytest.raises(DataError, match=r"^client 1: sample 17 holds a value that is not finite$"):
        run(overrides, data=[(X, Y), (spoilt, Y), (X, Y)])
    with pytest.raises(DataError, match=r"^the data: sample 17 holds a value that is not finite$"):
        run([*overrides, "clients=3", "data.partition=iid"], data=(spoilt, Y))
    with pytest.raises(DivergenceError, match="diverges"):
        run([*overrides, "eta=1e18", "eval.finetune=none"], data=[(X, Y)] * 3)


def test_a_partition_that_deals_nothing_is_told():
    said = "data.partition=dirichlet deals nothing here: the data says whose each sample is"
    for data in ([(X, Y)] * 3, (X, Y, Y)):
        assert said in made(data, None, partition="dirichlet").notes
        assert not any("data.partition" in note for note in made(data, None).notes)
    assert not any("deals nothing" in note for note in made((X, Y), 3, partition="dirichlet").notes)


def test_a_partition_by_class_needs_classes_and_natural_needs_clients():
    with pytest.raises(
        ConfigError,
        match="data.partition=classes deals samples by their class, and these have none; use data.partition=iid",
    ):
        made((X, X.sum(1)), 3)
    for data in ((X, Y), None):
        with pytest.raises(ConfigError, match="data.partition=natural needs data that says whose each sample is"):
            made(data, 3, partition="natural") if data else compose(["data.partition=natural"]).federation()
    with pytest.raises(ConfigError, match="clients=9, but the data has 3 clients"):
        made((X, Y, Y), 9)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [(torch.randint(9, (30, 4)), "takes floating-point inputs, and this data has int64"), (X[:, None], "")],
)
def test_our_networks_say_what_they_need(x, sentence):
    if sentence:
        with pytest.raises(ConfigError, match=sentence):
            run([*SMALL, "clients=3", "data.partition=iid"], data=(x, Y))
        with pytest.raises(ConfigError, match="gives one answer per sample"):
            run([*SMALL, "clients=3", "data.partition=iid"], data=(X, torch.stack([Y, Y], 1)))
    else:
        assert run([*SMALL, "clients=3", "data.partition=iid"], data=(x, Y)).accuracy["test"] <= 1


# -- from the command line --------------------------------------------------------------------------------------------


def summary(capsys, *arguments):
    assert main(["run", *arguments, *QUIET, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    assert main(["run", *arguments, *QUIET]) == 2
    said = capsys.readouterr().err
    assert said.startswith("persafl: ")
    assert len(said.strip().splitlines()) == 1
    return said


RUN = ["updates=8", "local_steps=2", "method=fedasync"]


def test_arrays_from_a_file(capsys, tmp_path):
    whole = Plain(200)
    np.savez("dealt.npz", x=whole.x, y=whole.y)
    np.savez(
        "own.npz",
        x=whole.x,
        y=whole.y,
        client=np.arange(200) % 8,
        split=np.array(["train", "test"])[np.arange(200) % 5 // 4],
    )
    assert (
        summary(capsys, "data=arrays", "data.path=dealt.npz", "clients=5", "data.partition=iid", *RUN)["accuracy"][
            "test"
        ]
        is not None
    )
    assert summary(capsys, "data=arrays", "data.path=own.npz", *RUN)["config"]["clients"] is None
    federation = compose(["data=arrays", "data.path=own.npz"]).federation()
    assert federation.clients == 8
    assert federation.sizes().sum() == 200
    few = compose(["data=arrays", "data.path=own.npz", "clients=3"]).federation()
    assert few.clients == 3
    assert few.notes == ("3 of the data's 8 clients take part, drawn by the seed",)
    assert main(["timeline", "data=arrays", "data.path=own.npz", "updates=9"]) == 0
    assert "of 8 clients" in capsys.readouterr().out
    assert main(["data", "arrays", "data.path=own.npz"]) == 0
    assert "8 clients hold 25 to 25 samples each" in capsys.readouterr().out
    assert (tmp_path / "arrays.png").exists()


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": X.numpy()}, "no array 'y' in it"),
        ({"y": Y.numpy()}, "no array 'x' in it"),
        ({"x": X.numpy(), "y": np.array([None] * 30)}, "it holds Python objects, which are never unpickled"),
        ({"x": X.numpy(), "y": Y.numpy()[:3]}, "x has 30 rows and y has 3; they need"),
    ],
)
def test_an_npz_with_wrong_contents_is_refused(arrays, sentence, capsys):
    np.savez("bad.npz", **arrays)
    assert sentence in refused(capsys, "data=arrays", "data.path=bad.npz", *RUN)


def test_files_that_are_not_there_are_named(capsys, tmp_path):
    assert "data.path is missing" in refused(capsys, "data=arrays")
    assert "cannot read 'none.npz': No such file" in refused(capsys, "data=arrays", "data.path=none.npz")
    assert "cannot look into data.root='none': No such file" in refused(capsys, "data=folder", "data.root=none")
    assert "has no folders in it" in refused(capsys, "data=folder", f"data.root={tmp_path}")
    assert "has no files train/*.json" in refused(capsys, "data=leaf", "data.root=none")


def pictures(folder, clients=4, size=8, mode="L"):
    generator = np.random.default_rng(0)
    for client in range(clients):
        for number, kind in enumerate(("cat", "dog")):
            place = folder / f"c{client}" / kind
            place.mkdir(parents=True)
            for index in range(6):
                shape = (size, size) if mode == "L" else (size, size, 3)
                Image.fromarray((generator.integers(90, size=shape) + 150 * number).astype(np.uint8)).save(
                    place / f"{index}.png"
                )
    return folder


def test_images_in_folders(capsys, tmp_path):
    pictures(tmp_path / "gray")
    found = summary(capsys, "data=folder", "data.root=gray", "model.channels=[2,2]", *RUN, "updates=60", "eta=0.1")
    assert found["accuracy"]["test"] > 0.7
    federation = compose(["data=folder", "data.root=gray"]).federation()
    assert (federation.clients, federation.classes, federation.shape) == (4, 2, (1, 8, 8))
    index = compose(["data=folder", "data.root=gray", "data.in_memory=0"]).federation()
    assert held(index) == held(federation)
    flipped = compose(["data=folder", "data.root=gray", "data.augment=[flip,crop]"]).federation()
    assert flipped.augmented
    assert held(flipped) == held(federation), "evaluation sees images as they are"
    pictures(tmp_path / "split" / "train", mode="RGB")
    pictures(tmp_path / "split" / "test", mode="RGB")
    by_split = compose(["data=folder", "data.root=split", "data.size=4"]).federation()
    assert by_split.shape == (3, 4, 4)
    assert by_split.sizes().tolist() == [[10, 2, 12]] * 4


def test_images_that_cannot_be_used_are_named(capsys, tmp_path):
    pictures(tmp_path / "images")
    Image.new("L", (5, 5)).save(tmp_path / "images" / "c2" / "dog" / "7.png")
    assert "client 2: sample 12 is (float32 (1, 5, 5)" in refused(capsys, "data=folder", "data.root=images")
    (tmp_path / "images" / "c2" / "dog" / "7.png").write_bytes(b"no image")
    assert "c2/dog/7.png" in refused(capsys, "data=folder", "data.root=images")
    (tmp_path / "images" / "c9").mkdir()
    assert "client 'c9' has no images" in refused(capsys, "data=folder", "data.root=images")


def leaf(folder, users=5, width=784, text=False):
    generator = np.random.default_rng(0)
    for name, samples in (("train", 12), ("test", 4)):
        (folder / name).mkdir(parents=True)
        for half in (0, 1):
            names = [f"f{user:04}" for user in range(users) if user % 2 == half]
            data = {
                user: {"x": ["to be or "] * samples, "y": ["n"] * samples}
                if text
                else {
                    "x": generator.random((samples, width)).round(3).tolist(),
                    "y": generator.integers(62, size=samples).tolist(),
                }
                for user in names
            }
            content = {"users": names, "num_samples": [samples] * len(names), "user_data": data}
            (folder / name / f"all_data_{half}_niid_0_keep_0_{name}_9.json").write_text(json.dumps(content))
    return folder


def test_leafs_files(capsys, tmp_path):
    leaf(tmp_path / "femnist")
    assert (
        summary(capsys, "data=leaf", "data.root=femnist", "model.channels=[2,2]", "data.classes=62", *RUN)["updates"]
        == 8
    )
    federation = compose(["data=leaf", "data.root=femnist", "data.classes=62"]).federation()
    assert (federation.clients, federation.classes, federation.shape) == (5, 62, (1, 28, 28))
    assert federation.sizes().tolist() == [[10, 2, 4]] * 5
    assert federation.inputs.dtype is torch.float32
    leaf(tmp_path / "shakespeare", text=True)
    text = compose(["data=leaf", "data.root=shakespeare"]).federation()
    assert text.inputs[0].tolist() == [72, 67, 1, 54, 57, 1, 67, 70, 1], "by hand: newline is 0, A is 25, a is 53"
    assert text.labels[0] == 66


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda content: content.pop("users"), "as LEAF's JSON (users, num_samples, user_data): no 'users' in it"),
        (lambda content: content["user_data"]["f0000"].pop("y"), "user 'f0000' has no lists x and y"),
        (lambda content: content["user_data"]["f0000"]["y"].pop(), "user 'f0000' has 12 x and 11 y"),
        (
            lambda content: content["user_data"]["f0000"]["x"][3].pop(),
            "user 'f0000': x must be numbers, as many for each sample",
        ),
        (lambda content: content["users"].remove("f0000"), "user 'f0000' is in test/ but not in train/"),
    ],
)
def test_leafs_files_with_wrong_contents_are_refused(damage, sentence, capsys, tmp_path):
    file = leaf(tmp_path / "femnist") / "train" / "all_data_0_niid_0_keep_0_train_9.json"
    content = json.loads(file.read_text())
    damage(content)
    file.write_text(json.dumps(content))
    assert sentence in refused(capsys, "data=leaf", "data.root=femnist", *RUN)


def test_synthetic_data_is_as_uneven_as_asked_for(capsys):
    assert summary(capsys, "data=synthetic", "clients=6", *RUN, "updates=30")["accuracy"]["test"] > 0.2

    def spread(alpha, beta, iid=False):
        x, y, sizes = Synthetic(alpha, beta, iid=iid).generate(60, 0)
        ends = np.cumsum(sizes)
        parts = np.split(np.arange(len(y)), ends[:-1])
        means = np.stack([x[part].mean(axis=0) for part in parts])
        kinds = np.stack([np.bincount(y[part], minlength=10) / len(part) for part in parts])
        return float(means.mean(axis=1).std()), kinds, sizes, x, parts

    assert spread(0, 0)[0] < 0.4 < spread(0, 1)[0] < 1.6
    assert spread(0, 0, iid=True)[1].std(axis=0).max() < spread(1, 1)[1].std(axis=0).max() / 2
    _, _, sizes, x, parts = spread(1, 1)
    assert sizes.min() >= 50
    assert sizes.max() > 10 * np.median(sizes), "a power law"
    largest = x[parts[int(sizes.argmax())]]
    np.testing.assert_allclose(largest.var(axis=0), np.arange(1, 61) ** -1.2, rtol=0.2)
    assert (
        Synthetic().federation(5, 1).digest()
        == Synthetic().federation(5, 1).digest()
        != Synthetic().federation(5, 2).digest()
    )


MINE = """
import sys
import torch
from torch.utils.data import TensorDataset

def clients(count=3):
    return [TensorDataset(torch.randn(20, 4), torch.arange(20) % 2) for _ in range(count)]

def raises():
    raise KeyError("no such table")

def leaves():
    sys.exit(7)

def nonsense():
    return 42

def nothing():
    pass

number = 3
"""


@pytest.mark.slow
def test_a_function_of_the_users_in_the_current_folder(tmp_path):
    """In a process of its own: `persafl` does not have the current folder on its path."""
    (tmp_path / "mine.py").write_text(MINE)
    code = f"import sys; sys.path = [path for path in sys.path if path] + [{str(ROOT)!r}]; from persafl_lit.cli import main; sys.exit(main())"

    def command(*arguments):
        call = [sys.executable, "-c", code, "run", "data=custom", *RUN, *QUIET, *arguments, "--json"]
        return subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)

    done = command("data.path=mine.clients", "data.args.count=4", "allow_code=true")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"]["test"] is not None


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("mine.raises", "data.path=mine.raises with data.args={} fails: KeyError: 'no such table' (mine.py, line 10)"),
        ("mine.leaves", "fails: SystemExit: 7"),
        ("mine.nonsense", "the data: 42 is no data; data= takes"),
        ("mine.nothing", "data.path=mine.nothing returns None"),
        ("mine.number", "TypeError: it is no function but 3"),
        ("mine.missing", "data.path=mine.missing is not there: the module mine has no 'missing'"),
        ("nowhere.clients", "data.path=nowhere.clients is not there: "),
        ("clients", "data.path must be package.module.function; got 'clients'"),
    ],
)
def test_a_function_that_fails_is_named(path, sentence, capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert sentence in refused(capsys, "data=custom", f"data.path={path}", "allow_code=true", *RUN)
    assert "pass allow_code=true if you trust it" in refused(capsys, "data=custom", f"data.path={path}", *RUN)


def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["own_data.py", "updates=40", *QUIET])
    runpy.run_path(str(ROOT / "examples" / "own_data.py"), run_name="__main__")
    assert "client 5: test accuracy" in capsys.readouterr().out


def test_the_page_about_data_is_executed():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), flags=re.DOTALL)
    found = {}
    exec(block.replace('["model=mlp"', f'[*{QUIET}, "model=mlp"'), found)
    assert found["result"].federation.sizes().tolist() == [[20, 8, 12]] * 6


def test_what_users_need_is_importable_from_the_package():
    assert issubclass(persafl_lit.Augmented, Dataset)
    assert issubclass(Indexed, persafl_lit.Federation)


def test_a_label_that_would_make_a_billion_classes_is_refused_before_any_network_is_built():
    strange = [TensorDataset(torch.ones(30, 5), 10**9 + torch.arange(30) % 3) for _ in range(2)]
    with pytest.raises(
        DataError, match=r"the labels go up to 1000000002, which makes 1,000,000,003 classes for \d+ of them"
    ):
        run(["model=logistic", "updates=4", *SERIAL], data=strange)
