"""Everything private here, replayed on awkward neighbours with the same noisy results.

Each query moves by no more than was declared, and nothing else that is public moves at all.
"""

import math
import random
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import clipless
from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.audit import record, replay, with_empty_record, with_empty_user
from clipless.common import fresh_bits
from clipless.errors import PrivacyError
from clipless.images import ImageRule, train_images
from clipless.privacy import EnforcedBounds, Ledger, Relation, Users
from clipless.statistics import PrivateRows, fit_channels, fit_covariance, fit_scaling
from clipless.training import Trainer, TrainingOptions
from tests.audit.neighbours import LONE, assert_replays, neighbours, records, with_record
from tests.privacy import runs as small


def mlp(*more):
    return nn.Sequential(
        lip.BoundedInput(1.0),
        lip.SpectralLinear(6, 8, bias=True),
        lip.GroupSort(2),
        nn.Dropout(0.2),
        lip.SpectralLinear(8, 3),
        *more,
    )


def trained(loader, *, model=None, steps=4, **options):
    """An ordinary loop; returns what a user would publish."""
    model = mlp() if model is None else model
    criterion = losses.CrossEntropy(tau=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine = PrivacyEngine()
    model, optimizer, private = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=criterion,
        target_epsilon=4.0,
        **small.engine_arguments(engine.make_private_with_epsilon, {"steps": steps} | options),
    )
    taken = 0
    while taken < steps:
        for x, y in private:
            loss = criterion(model(x), y)
            loss.backward()
            if not private.current.is_last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
            if taken == steps:
                break
    return {
        "weights": model.state_dict(),
        "epsilon": engine.get_epsilon(),
        "plan": engine.plan.to_dict(),
    }


def jitter(batch, *, generator):
    return batch + 0.1 * torch.randn(batch.shape, generator=generator)


LOOPS = {
    "poisson": {},
    "padded": {"pad": True},
    "micro-batches": {"micro_batch_size": 5},
    "views": {"augment": jitter, "views": 2},
    "all records": {"sampling": "full_batch"},
    "fixed size": {"sampling": "fixed_size"},
    "epochs": {"sampling": "epochs"},
    "correlated noise": {"sampling": "epochs", "noise": "correlated"},
}


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_engine_loop(options):
    data = records()

    def run(data):
        return trained(DataLoader(TensorDataset(*data), batch_size=20), **options)

    assert_replays(record(run, data), neighbours(data))


def ordinary():
    """No Lipschitz layer in it: its bounds are enforced."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"bounds": EnforcedBounds(thresholds=0.3), "micro_batch_size": 5},
        {"noise": "correlated", "sampling": "epochs"},
        pytest.param({"pad": True}, marks=pytest.mark.slow),
    ],
    ids=["fixed thresholds", "epochs", "padded"],
)
def test_any_network(options):
    data = records()

    def run(data):
        loader = DataLoader(TensorDataset(*data), batch_size=20)
        return trained(loader, model=ordinary(), **{"bounds": "enforced"} | options)

    assert_replays(record(run, data), neighbours(data))


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"bounds": "enforced", "model": ordinary}, marks=pytest.mark.slow)],
    ids=["proved", "enforced"],
)
def test_people_with_several_records(options):
    """Every user emptied, and one whose records all hold something extreme."""
    data, users = records(60), Users(np.arange(60) * 7 % 23, records=2)

    def run(data):
        made = {key: each() if key == "model" else each for key, each in options.items()}
        loader = DataLoader(TensorDataset(*data), batch_size=20)
        return trained(loader, unit=users, **made)

    others = {f"user {user} emptied": with_empty_user(data, users, user) for user in range(23)}
    for value in (0.0, 1e30, math.nan, math.inf):
        others[f"all records of one are {value}"] = with_record(data, users.of(4), value, 2)
    assert_replays(record(run, data), others)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_loop():
    data = records()

    def run(data):
        loader = DataLoader(TensorDataset(*data), batch_size=20)
        return trained(loader, compile="aot_eager")

    assert_replays(record(run, data), neighbours(data))


@pytest.mark.slow
@pytest.mark.parametrize("make", [small.mlp, small.cnn, small.residual])
@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_many_neighbours_of_larger_networks(make, options):
    """Every record emptied, every record replaced by something random, over more steps."""
    data = records(shape=small.SHAPES[make])
    generator = torch.Generator().manual_seed(5)

    def run(data):
        loader = DataLoader(TensorDataset(*data), batch_size=20)
        return trained(loader, model=make(), steps=20, **options)

    others = neighbours(data)
    for index in range(40):
        scale = 10.0 ** float(torch.randint(-6, 7, (), generator=generator))
        strange = scale * torch.randn(small.SHAPES[make], generator=generator)
        others[f"{index} emptied"] = with_empty_record(data, index)
        others[f"{index} replaced"] = with_record(data, index, strange, index % 3)
    assert_replays(record(run, data), others)


def test_a_threshold_that_follows_a_quantile():
    data = records()

    def run(data):
        model = mlp(lip.ClipGradient(0.5, follow=lip.FollowQuantile(rate=1.0)))
        loader = DataLoader(TensorDataset(*data), batch_size=20)
        return trained(loader, model=model), model[-1].threshold()

    recording = record(run, data)
    assert_replays(recording, neighbours(data))
    names = [query.name for query in recording.replay(with_empty_record(data, 0)).queries]
    assert names.count("examples above the threshold of 5") == 4


class Items(Dataset):
    """A data set that is no tensor, read through a `DataLoader`."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, index):
        return self.data[0][index], self.data[1][index]


def test_data_sets_of_one_item_at_a_time():
    data = Items(records())

    def run(data):
        return trained(DataLoader(data, batch_size=20))

    others = {
        name: each if not isinstance(each, tuple) else Items(each)
        for name, each in neighbours(data.data).items()
    }
    others |= {f"record {index}": with_empty_record(data, index) for index in (0, LONE, 39)}
    others = {name: each for name, each in others.items() if " emptied" not in name}
    assert_replays(record(run, data), others)


@pytest.mark.usefixtures("quick_folders")
def test_trainer_and_its_folder():
    data, validation = records(), records(20, seed=1)

    def run(data, folder):
        trainer = Trainer(
            mlp(),
            losses.CrossEntropy(tau=4.0),
            target_epsilon=4.0,
            batch_size=20,
            steps=3,
            run_dir=folder,
            training=TrainingOptions(progress=False),
        )
        result = trainer.fit(data, validation)
        return {
            "weights": trainer.model.state_dict(),
            "average": trainer.average.averaged_parameters(),
            "epsilon": result.epsilon,
            "metrics": [result.metrics, result.averaged_metrics],
            "report": str(trainer.report()),
        }

    recording = record(run, data, with_folder=True)
    assert_replays(recording, neighbours(data))
    files = recording._outcome.files
    assert {"plan.json", "ledger.jsonl"} <= set(files)
    assert "metrics.jsonl" not in files
    assert not any(name.startswith("checkpoints") for name in files)


@pytest.mark.parametrize("full", [True, False], ids=["all images", "poisson"])
def test_image_recipe(full):
    x, y = records(shape=(1, 8, 8))
    rule = ImageRule.choose(examples=40, epsilon=4.0)
    rule = {**vars(rule), "steps": 3, "full_batch": full, "batch_size": 40 if full else 20}

    def run(data):
        images, labels = data
        trained = train_images(images, labels, classes=3, epsilon=4.0, rule=ImageRule(**rule))
        return trained.model, trained.privacy.epsilon, trained.privacy.plan.to_dict()

    recording = record(run, (x, y))
    assert_replays(recording, neighbours((x, y)))
    names = {query.name for query in recording.replay(with_empty_record((x, y), 0)).queries}
    assert {"channel histograms", "channel means", "channel deviations"} < names
    assert "channel covariance" in names


def statistics(data):
    """Every private statistic that there is."""
    x, y = data
    ledger = Ledger.in_memory(dataset_size=len(x), relation=relation())
    rows = PrivateRows(x, y, ledger=ledger)
    scaling = fit_scaling(
        rows, numbers=lambda x, y: x, numeric=x.shape[1], codes=lambda x, y: y[:, None],
        buckets=[4], noise_multiplier=3.0,
    )  # fmt: skip
    columns = {"features": lambda x, y: x[:, None, :], "noise_multiplier": 3.0}
    channels = fit_channels(rows, channels=1, **columns)
    covariance = fit_covariance(rows, **columns)
    mapped = rows.map_rows(lambda x, y: (2 * x, y))
    total = mapped.noisy_sum(
        lambda x, y: x[:, :2], bound=1.0, noise_multiplier=1.0, label="sum"
    )  # fmt: skip
    return scaling, channels, covariance, total, repr(rows), [e.label for e in ledger.entries()]


def relation():
    return getattr(Relation, "ZERO_OUT", None) or Relation.ADD_REMOVE


def test_private_statistics():
    data = records()
    others = neighbours(data)
    assert_replays(record(statistics, data), others)
    names = [query.name for query in replay(statistics, data, with_empty_record(data, 0)).queries]
    assert names == [
        "column histograms", "column means", "column spreads", "channel histograms",
        "channel means", "channel deviations", "channel covariance", "sum",
    ]  # fmt: skip


def test_statistics_of_an_empty_record_are_those_of_the_others():
    """A count loses exactly the emptied record, however full its place is."""
    data = (torch.ones(40, 1), torch.zeros(40).long())

    def run(data):
        ledger = Ledger.in_memory(dataset_size=40, relation=relation())
        rows = PrivateRows(*data, ledger=ledger)
        return rows.noisy_counts(
            lambda x, y: y[:, None], bins=[2], noise_multiplier=1.0, label="counts"
        )

    recording = record(run, data)
    (query,) = recording.replay(with_empty_record(data, -1)).queries
    assert (query.distance, query.factor) == (1.0, 1)
    (query,) = recording.replay(with_record(data, 3, y=1)).queries
    assert (query.distance, query.factor) == (pytest.approx(math.sqrt(2)), 2)
    assert recording._transcript.releases[0].before[0].tolist() == [40, 0]


# --- sweeps --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_folders")
def test_sweep():
    from clipless.sweeps import Outcome, Sweep, run_sweep

    data, validation = records(), records(20, seed=1)
    sweep = Sweep.from_dict(
        {
            "sweep": {"trials": 2, "sampler": "tpe", "pruner": "hyperband"},
            "space": {"training.learning_rate": {"low": 0.01, "high": 1.0}},
        }
    )

    def run(data):
        def train(settings, place, report):
            trainer = Trainer(
                mlp(),
                losses.CrossEntropy(),
                target_epsilon=4.0,
                batch_size=20,
                steps=2,
                training=TrainingOptions(
                    optimizer=lambda p: torch.optim.SGD(p, lr=settings["training"]["learning_rate"])
                ),
            )
            found = trainer.fit(data, validation)
            report(1, found.metrics["accuracy"])
            return Outcome(
                value=found.metrics["accuracy"], epsilon=found.epsilon, delta=found.delta
            )

        with tempfile.TemporaryDirectory() as folder:
            result = run_sweep(sweep, folder, train=train)
        found = [(trial.settings, trial.value, trial.epsilon) for trial in result.trials]
        return found, result.best.value

    assert_replays(record(run, data), neighbours(data))


# --- what the audit itself does ------------------------------------------------------------------


def test_the_order_of_releases_and_their_results_are_handed_out_again():
    data = records()
    recording = record(statistics, data)
    one, two = (
        recording.replay(with_empty_record(data, 3)),
        recording.replay(with_empty_record(data, 3)),
    )
    assert one == two
    again = recording.replay(data)
    assert again.passed
    assert {query.distance for query in again.queries} == {0.0}


def test_differences_are_found_in_whatever_is_returned():
    shared = {"a": [1, 2.0, None], "b": torch.zeros(2), "c": np.ones(3), "d": float("nan")}

    def returning(what):
        return replay(lambda data: what if data else shared, 0, 1)

    assert returning(dict(shared)).passed
    others = {
        "result['a'][1]": {**shared, "a": [1, 2.5, None]},
        "result['a']": {**shared, "a": [1, 2.0]},
        "result['b']": {**shared, "b": torch.tensor([0.0, 1e-45])},
        "result['b']['dtype']": {**shared, "b": torch.zeros(2).double()},
        "result['c']": {**shared, "c": np.array([1.0, 1.0, np.nan])},
        "result['d']": {**shared, "d": 0.0},
        "result": {**shared, "e": 1},
    }
    for place, other in others.items():
        found = returning(other).differences
        assert found, place
        assert any(each.startswith(place) for each in found), found
    zeros = replay(lambda data: -0.0 if data else 0.0, 0, 1)
    assert not zeros.passed
    model = lip.SpectralLinear(2, 2)
    assert replay(lambda data: model, 0, 1).passed
    with pytest.raises(TypeError, match="plain data"):
        replay(lambda data: object(), 0, 1)


def test_what_is_random_and_no_noise_is_drawn_once():
    from clipless.sweeps import Repetitions

    def run(data):
        drawn = [Repetitions(mean=100.0).draw() for _ in range(5)]
        return drawn, torch.rand(3), np.random.rand(3), random.random()

    recording = record(run, 0)
    assert recording.replay(1).passed
    assert recording._outcome.result[0] != record(run, 0)._outcome.result[0]
    found = record(lambda data: [fresh_bits(8) for _ in range(1 + data)], 0).replay(1)
    assert found.differences == ("8 random bits are drawn where there were none",)


def test_errors():
    def fails(data):
        raise ValueError("always")

    with pytest.raises(ValueError, match="always"):
        replay(fails, 0, 1)

    def sometimes(data):
        if data:
            raise ValueError("a record is odd")

    (found,) = replay(sometimes, 0, 1).differences
    assert "ended with a result, on the neighbour with ValueError: a record is odd" in found
    (found,) = replay(sometimes, 1, 0).differences
    assert "ended with ValueError" in found
    with pytest.raises(RuntimeError, match="do not nest"):
        replay(lambda data: replay(lambda data: 0, 0, 1), 0, 1)
    assert replay(lambda data: 0, 0, 1).passed  # and nothing is left behind


def test_empty_records():
    frame = pytest.importorskip("pandas").DataFrame({"a": [1, 2, 3], "b": list("xyz")})
    found = with_empty_record((frame, frame["b"], np.arange(3)), -1)
    assert found.data[0]["b"].tolist() == ["x", "y", "y"]
    assert found.data[0].index.tolist() == [0, 1, 2]
    assert (found.data[1].tolist(), found.data[2].tolist()) == (["x", "y", "y"], [0, 1, 1])
    assert (found.index, found.size) == (2, 3)
    with pytest.raises(ValueError, match="no record 3"):
        with_empty_record(frame, 3)
    with pytest.raises(ValueError, match="no record 0"):
        with_empty_record(torch.zeros(1), 0)
    with pytest.raises(TypeError, match="cannot be emptied"):
        with_empty_record({1: 2, 3: 4}, 0)


def test_an_empty_record_needs_the_whole_data():
    data = records()

    def run(data):
        return trained(DataLoader(TensorDataset(*(part[:30] for part in data)), batch_size=20))

    with pytest.raises(PrivacyError, match="uses 30 of 40 records"):
        replay(run, data, with_empty_record(data, 3))
    assert replay(run, data, with_record(data, 3, 1e9)).passed


def test_all_noise_is_added_in_one_place():
    """Nothing in the package adds noise but `release_`, and nothing draws keys but `fresh_bits`.

    A key from elsewhere differs in the replay, and so would everything that follows from it.
    """
    package = Path(clipless.__file__).parent
    sources = {
        path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")
    }
    adding = {name for name, text in sources.items() if re.search(r"noise\.add_\(", text)}
    assert adding == {"common/_release.py"}
    drawing = r"secrets\.(randbits|token|SystemRandom)|os\.urandom|torch\.seed\("
    own = {"common/_release.py", "audit/_canaries.py"}
    # Keys of noise: in a replay it is the replay that adds noise.
    own |= {"kernels/randomness/_gaussian.py", "privacy/noise/_correlated.py"}
    own |= {"federated/_shares.py"}
    own |= {"audit/replaying/_record.py", "cli/_canary_run.py"}  # audits draw for themselves
    assert {name for name, text in sources.items() if re.search(drawing, text)} == own


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.json", '{{"seconds": 1, "digest": "{0}"}}'), ("run.json", '{{"source": {0}}}'),
     ("page.html", "<p>mean {0}, in 3.5 seconds</p>")],
)  # fmt: skip
def test_files_are_compared_but_for_when_they_were_written(name, text):
    """A digest of the data, or a number on a line that also speaks of seconds, is a difference."""

    def run(x, folder):
        total = float(x.sum())
        (folder / name).write_text(text.format(total))

    x = torch.ones(4, 1)
    assert not replay(run, x, torch.zeros(4, 1), with_folder=True).passed
    assert not replay(run, x, x.clone(), with_folder=True).differences
