"""`train_run` and `open_run` without the shell: exact rebuilding, resuming, tables."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from clipless.errors import PrivacyError
from clipless.folders import RunFolder
from clipless.ledger import read_ledger
from clipless.runs import (
    ConfigError,
    RunConfig,
    RunFolderError,
    check_data,
    load_data,
    make_trainer,
    open_run,
    train_run,
)
from clipless.runs._train import resolved_config
from clipless.runs.data._digests import data_digests
from clipless.training import Callback

SMALL = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": 8},
    "privacy": {"noise_multiplier": 3.0},
    "training": {"steps": 12, "batch_size": 100, "seed": 5, "check_bounds": 0, "validate": False},
}


def config(**changes):
    return RunConfig.from_dict({**SMALL, **changes})


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer):
        if trainer.step == self.step:
            raise RuntimeError("stop")


def test_the_model_is_rebuilt_exactly(tmp_path):
    x = torch.rand(5, 1, 8, 8)
    outputs = []

    class Keep(Callback):
        def on_fit_end(self, trainer):
            outputs.append(trainer.predict(x))

    run = train_run(config(), tmp_path / "run", callbacks=[Keep()], report=False)
    opened = open_run(tmp_path / "run")
    assert torch.equal(opened.model(x).detach(), outputs[0])
    assert opened.epsilon() == run.epsilon
    assert opened.result["weights_sha256"] == run.weights_sha256
    data = opened.data()
    right = (opened.model(data.test[0]).argmax(1) == data.test[1]).float().mean().item()
    assert right == pytest.approx(run.metrics["accuracy"], abs=1e-6)


def test_the_global_generator_is_left_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    train_run(config(), tmp_path / "run", report=False)
    open_run(tmp_path / "run")
    assert torch.equal(torch.rand(1), expected)


def test_a_run_that_failed_goes_on(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        train_run(config(), tmp_path / "broken", callbacks=[StopAt(7)], report=False)
    with pytest.raises(RunFolderError, match="has not ended"):
        open_run(tmp_path / "broken")
    with pytest.raises(ConfigError, match="holds a run already"):
        train_run(config(), tmp_path / "broken", report=False)
    resumed = train_run(config(), tmp_path / "broken", resume=True, report=False)
    assert resumed.resumed_from is not None
    assert (tmp_path / "broken" / "model.safetensors").exists()
    # Steps that came out the same are not paid for again.
    assert sum(read_ledger(tmp_path / "broken" / "ledger.jsonl").counts().values()) == 12


def test_resuming_another_run_or_other_data_is_refused(tmp_path):
    train_run(config(), tmp_path / "run", report=False)
    other = config(training={**SMALL["training"], "learning_rate": 0.5})
    with pytest.raises(ConfigError, match=r"training\.learning_rate was 0\.01, is 0\.5"):
        train_run(other, tmp_path / "run", resume=True, report=False)
    text = (tmp_path / "run" / "data.json").read_text()
    (tmp_path / "run" / "data.json").write_text(
        text.replace('"hmac_sha256": "', '"hmac_sha256": "f', 1)
    )
    with pytest.raises(RunFolderError, match="train data are not those"):
        train_run(config(), tmp_path / "run", resume=True, report=False)


def test_digests_of_data_are_keyed(tmp_path):
    """Whoever knows the data cannot tell from `data.json` that they were the run's."""
    for name in ("one", "two"):
        train_run(config(), tmp_path / name, report=False)
    data = load_data(config().data)
    plain = {data_digests(data)[part]["sha256"] for part in ("train", "test")}
    texts = [(tmp_path / name / "data.json").read_text() for name in ("one", "two")]
    assert not any(digest in text for digest in plain for text in texts)
    first, second = (json.loads(text) for text in texts)
    assert first["train"]["hmac_sha256"] != second["train"]["hmac_sha256"]
    for name in ("one", "two"):
        key = tmp_path / name / "private" / "data.key"
        assert len(key.read_bytes()) == 32
        assert key.stat().st_mode & 0o077 == 0
        assert key.parent.stat().st_mode & 0o077 == 0
        for path in (tmp_path / name).iterdir():
            if path.is_file():
                assert key.read_bytes() not in path.read_bytes()
        check_data(RunFolder(tmp_path / name), data)
    (tmp_path / "one" / "private" / "data.key").write_bytes(bytes(32))
    with pytest.raises(RunFolderError, match="of other contents"):
        check_data(RunFolder(tmp_path / "one"), data)
    (tmp_path / "two" / "private" / "data.key").unlink()
    with pytest.raises(RunFolderError, match=r"data\.key cannot be read"):
        check_data(RunFolder(tmp_path / "two"), data)


def test_folders_of_before_there_were_keys_are_read(tmp_path):
    train_run(config(), tmp_path / "run", report=False)
    data = load_data(config().data)
    found = {"format": "clipless-data", "version": 1, **data_digests(data)}
    (tmp_path / "run" / "data.json").write_text(json.dumps(found))
    check_data(RunFolder(tmp_path / "run"), data)
    found["test"]["sha256"] = "0" * 64
    (tmp_path / "run" / "data.json").write_text(json.dumps(found))
    with pytest.raises(RunFolderError, match="test data are not those"):
        check_data(RunFolder(tmp_path / "run"), data)


def test_where_things_are_may_change(tmp_path):
    """Device and folders of data are places, not parts of what is trained."""
    train_run(config(), tmp_path / "run", report=False)
    moved = config(data={"name": "digits", "root": "elsewhere", "download": False})
    assert train_run(moved, tmp_path / "run", resume=True, report=False).resumed_from == 12


def test_a_failure_before_the_first_step_leaves_nothing(tmp_path):
    bad = config(model={"name": "mlp", "hidden": 7})
    with pytest.raises(ConfigError, match="even"):
        train_run(bad, tmp_path / "run", report=False)
    assert not (tmp_path / "run").exists()


def test_weights_outside_their_constraints_are_refused(tmp_path):
    """Somebody who edits the weights and the digest: the constraint gives them away."""
    import safetensors.torch

    train_run(config(), tmp_path / "run", report=False)
    path = tmp_path / "run" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = next(key for key in weights if key.endswith("weight"))
    weights[name] *= 3
    safetensors.torch.save_file(weights, path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    result["weights_sha256"] = RunFolder(path.parent).weights_digest()
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    with pytest.raises(RunFolderError, match="prove nothing"):
        open_run(tmp_path / "run")


def test_bounds_are_checked_while_training(tmp_path, monkeypatch):
    """A wrong bound stops the run: gradients are compared with bounds at every checkpoint."""
    from clipless.audit.gradients import _tightness

    right = _tightness.sensitivity

    def halved(*given, **options):
        report = right(*given, **options)
        half = tuple(replace(p, gradient_bound=p.gradient_bound / 50) for p in report.parameters)
        return replace(report, parameters=half)

    monkeypatch.setattr(_tightness, "sensitivity", halved)
    watched = config(training={**SMALL["training"], "check_bounds": 16})
    with pytest.raises(PrivacyError, match="exceed the bounds"):
        train_run(watched, tmp_path / "run", report=False)


@pytest.mark.parametrize(("begin", "threshold"), [({}, 2**0.5), ({"clip_gradient": 0.5}, 0.5)])
def test_loss_gradients_are_clipped_at_a_quantile(tmp_path, begin, threshold):
    """The threshold moves; an opened run is again the one that was planned, with its weights."""
    clipped = config(
        model={**SMALL["model"], **begin},
        training={
            **SMALL["training"], "clip_quantile": 0.5, "check_bounds": 16, "checkpoint_every": 5,
        },
    )  # fmt: skip
    moved = []

    class Watch(Callback):
        def on_fit_end(self, trainer):
            moved.append(trainer.model[-1].norm)

    run = train_run(clipped, tmp_path / "run", callbacks=[Watch()], report=False)
    opened = open_run(tmp_path / "run")
    assert opened.model[-1].norm == pytest.approx(threshold)
    assert opened.model[-1].follow.quantile == 0.5
    assert abs(moved[0] / threshold - 1) > 0.05
    assert [query.name for query in opened.plan.queries] == [
        f"examples above the threshold of {len(opened.model) - 1}"
    ]
    assert opened.epsilon() == run.epsilon
    with pytest.raises(RuntimeError, match="stop"):
        train_run(clipped, tmp_path / "broken", callbacks=[StopAt(8)], report=False)
    again = train_run(clipped, tmp_path / "broken", resume=True, report=False)
    assert again.resumed_from == 5
    assert sum(read_ledger(tmp_path / "broken" / "ledger.jsonl").counts().values()) == 12


def test_precision_and_compilation_reach_the_trainer(tmp_path):
    rounded = config(training={**SMALL["training"], "precision": "bfloat16"})
    run = train_run(rounded, tmp_path / "run", report=False)
    opened = open_run(tmp_path / "run")
    assert opened.plan.precision == "bfloat16"
    assert opened.plan.arithmetic_slack > 0.01
    assert (run.steps, run.stopped) == (12, "finished")
    compiled = config(training={**SMALL["training"], "compile": True})
    full = resolved_config(compiled, load_data(compiled.data))
    options = make_trainer(full)._options
    assert (options.compile, options.batches.pad, options.precision) == (True, True, "float32")
    assert resolved_config(rounded, load_data(rounded.data)).training.pad is False


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    random = np.random.default_rng(0)
    age, job = random.integers(18, 80, 1200), random.choice(["baker", "nurse", "pilot"], 1200)
    score = (age - 45) / 20 + 1.5 * (job == "pilot") + random.normal(0, 0.5, 1200)
    lines = [
        f"{a if k % 17 else ''},{j},{'high' if s > 0 else 'low'},{100 * s:.2f}"
        for k, (a, j, s) in enumerate(zip(age, job, score, strict=True))
    ]
    path = tmp_path_factory.mktemp("tables") / "people.csv"
    path.write_text("\n".join(["age,job,income,amount", *lines]) + "\n")
    return path


def table(people, **changes):
    data = {"file": str(people), "target": "income"}
    return RunConfig.from_dict(
        {"data": data, "privacy": {"epsilon": 3.0}, "model": {"steps": 40}, **changes}
    )


def test_a_table(people, tmp_path):
    run = train_run(table(people), tmp_path / "run", report=False)
    assert run.epsilon <= 3.0
    assert run.steps == 40
    assert run.metrics["accuracy"] > 0.8
    opened = open_run(tmp_path / "run")
    assert opened.tabular
    assert opened.epsilon() == pytest.approx(run.epsilon)
    assert opened.config.model.settings["steps"] == 40
    data = opened.data()
    x, y = opened.tensors(data.test)
    predicted = opened.estimator.classes_[(opened.model(x)[:, 0] > 0).long().numpy()]
    assert (predicted == opened.estimator.predict(data.test[0])).all()
    assert ((y > 0).numpy() == (np.asarray(data.test[1]) == opened.estimator.classes_[1])).all()
    with pytest.raises(ConfigError, match="nothing to go on with"):
        train_run(table(people), tmp_path / "run", resume=True, report=False)


def test_a_regression(people, tmp_path):
    data = {"file": str(people), "target": "amount", "task": "regression"}
    run = train_run(table(people, data=data), tmp_path / "run", report=False)
    assert run.metrics["r2"] > 0.3
    assert open_run(tmp_path / "run").input_shape == (
        open_run(tmp_path / "run").model[1].in_features,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"steps": 5}}, r"training\.steps does not apply to tables"),
        ({"privacy": {"epsilon": 3.0, "sampling": "full_batch"}}, r"privacy\.sampling"),
        ({"privacy": {"noise_multiplier": 1.0}}, "privacy.noise_multiplier"),
        ({"loss": {"name": "cross_entropy"}}, "own loss"),
        ({"model": {"widht": 5}}, "widht"),
        ({"model": {"name": "mlp"}}, "tabular, not mlp"),
    ],
)
def test_what_tables_do_not_offer_is_refused(people, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train_run(table(people, **changes), tmp_path / "run", report=False)
    assert not (tmp_path / "run").exists()


def test_images_are_no_table(tmp_path):
    with pytest.raises(ConfigError, match="for tables"):
        train_run(
            RunConfig.from_dict(
                {
                    "data": {"name": "digits"},
                    "model": {"name": "tabular"},
                    "privacy": {"epsilon": 1.0},
                }
            ),
            tmp_path / "run",
        )


def test_images_by_scattering(tmp_path):
    """The third kind of run: features of images, private statistics, one layer."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 3000)
    stripes = 200 * (np.arange(8) % 4 < 2)
    x = np.where(labels[:, None, None] == 1, stripes[:, None], stripes[None, :])
    x = (x + random.integers(0, 50, x.shape)).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x=x, y=labels)
    settings = {"name": "scattering", "steps": 40, "certified": True}
    given = {
        "data": {"file": str(tmp_path / "images.npz"), "class_count": 2},
        "model": settings,
        "privacy": {"epsilon": 8.0},
    }
    run = train_run(RunConfig.from_dict(given), tmp_path / "run", report=False)
    assert run.epsilon <= 8.0
    assert run.metrics["accuracy"] > 0.8
    opened = open_run(tmp_path / "run")
    assert opened.kind == "scattering"
    assert opened.epsilon() == pytest.approx(run.epsilon)
    data = opened.data()
    right = (opened.model(data.test[0]).argmax(1) == data.test[1]).float().mean().item()
    assert right == pytest.approx(run.metrics["accuracy"])
    bad = RunConfig.from_dict({**given, "training": {"epochs": 3}})
    with pytest.raises(ConfigError, match=r"training\.epochs does not apply to images"):
        train_run(bad, tmp_path / "other", report=False)
