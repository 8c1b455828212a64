"""The layout of run folders: one module knows it, it has a version, and old folders are read."""

import ast
import json
import shutil
import stat
from pathlib import Path

import pytest

import clipless
from clipless.folders import PRIVATE_NAMES, CheckpointFile, RunFile, RunFolder, RunFolderError
from clipless.report import ReportError, build
from clipless.runs import RunConfig, open_run, train_run
from tests.cli.shell import here
from tests.damage import RAW
from tests.training.small import DATA, trainer

PACKAGE = Path(clipless.__file__).parent
NAMES = {each.value for each in (*RunFile, *CheckpointFile)}
SMALL = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": 8},
    "privacy": {"noise_multiplier": 3.0},
    "training": {"steps": 6, "batch_size": 100, "seed": 5, "check_bounds": 0, "validate": False},
}


def spelled_out(tree):
    """File names of the layout in a module: as whole texts, at the end of a path, or joined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if isinstance(node.right, ast.Constant) and node.right.value in NAMES:
                yield node.right.value, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.rpartition("/")[2] if " " not in node.value else node.value
            if "." in name and name in NAMES:
                yield name, node.lineno


@pytest.mark.parametrize(
    "code",
    ['folder / "plan.json"', 'f"{folder}/ledger.jsonl"', 'Path(a, "config.json")',
     'folder / "checkpoints"', 'NAME = "report.html"', 'p.with_name("data.json")'],
)  # fmt: skip
def test_the_search_finds_every_way_to_name_a_file(code):
    assert list(spelled_out(ast.parse(code)))


def test_one_module_names_the_files():
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() != "folders/_layout.py"
        for name, line in spelled_out(ast.parse(path.read_text()))
    ]
    assert found == []


def old_folder(path):
    """A folder in the layout of version 1, written file by file without `RunFolder`."""
    made = path.with_name("made")
    train_run(RunConfig.from_dict(SMALL), made, report=False)
    path.mkdir()
    for name in ("config", "environment", "data", "result"):
        fields = json.loads((made / f"{name}.json").read_text())
        fields.pop("format"), fields.pop("version")
        head = {"format": f"clipless-{name}", "version": 1}
        (path / f"{name}.json").write_text(json.dumps({**head, **fields}, indent=2) + "\n")
    plan = json.loads((made / "plan.json").read_text())
    fields = {
        "format": "clipless-run", "version": 1, "plan": plan["plan"],
        "belongs_to": plan["belongs_to"], "written_by": {"clipless": "0.9"},
    }  # fmt: skip
    (path / "plan.json").write_text(json.dumps(fields, indent=2) + "\n")
    (path / "private").mkdir()
    for name in ("ledger.jsonl", "model.safetensors", "metrics.jsonl", "private/data.key"):
        (path / name).write_bytes((made / name).read_bytes())
    shutil.copytree(made / "checkpoints", path / "checkpoints")
    shutil.rmtree(made)
    return path


def test_folders_of_version_1_are_read_and_gone_on_with(tmp_path):
    folder = old_folder(tmp_path / "run")
    assert RunFolder(folder).version == 1
    opened = open_run(folder)
    assert opened.result["steps"] == 6
    assert opened.epsilon() > 0
    assert opened.data().size == 1434
    assert build(folder).sound
    for command in ("report", "budget", "bounds", "audit", "certify"):
        outcome = here(command, folder)
        assert outcome.code == 0, outcome.err
    again = train_run(opened.config, folder, resume=True, report=False)
    assert again.resumed_from == 6
    assert not (folder / "format.json").exists()  # it stays what it is


def test_new_folders_have_a_version(tmp_path):
    trainer(tmp_path / "run", steps=3).fit(DATA)
    text = json.loads((tmp_path / "run" / "format.json").read_text())
    assert text == {"format": "clipless-run-folder", "version": 2}
    assert RunFolder.open(tmp_path / "run").version == 2


def test_a_newer_layout_is_refused(tmp_path):
    folder = tmp_path / "run"
    config = RunConfig.from_dict(SMALL)
    train_run(config, folder, report=False)
    (folder / "format.json").write_text('{"format": "clipless-run-folder", "version": 3}')
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match=r"version 3 .* versions 1 to 2.*upgrade"):
        open_run(folder)
    with pytest.raises(ReportError, match="version 3"):
        build(folder)
    with pytest.raises(RunFolderError, match="version 3"):
        train_run(config, folder, resume=True)
    with pytest.raises(RunFolderError, match="version 3"):
        trainer(folder, resume=True).fit(DATA)
    for command in ("report", "budget", "bounds", "audit", "certify"):
        outcome = here(command, folder)
        assert outcome.code == 5, outcome.err
        assert "version 3" in outcome.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("data", RAW.values(), ids=RAW)
def test_a_damaged_version_is_named(tmp_path, data):
    (tmp_path / "format.json").write_bytes(data)
    with pytest.raises(RunFolderError, match=r"format\.json was damaged.*backup"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("name", [RunFile.CONFIG, RunFile.RESULT, RunFile.DATA, RunFile.PLAN])
@pytest.mark.parametrize("data", RAW.values(), ids=RAW)
def test_damaged_files_are_named(tmp_path, name, data):
    folder = RunFolder(tmp_path)
    folder.file(name).write_bytes(data)
    read = folder.read_plan if name is RunFile.PLAN else lambda: folder.read_json(name)
    with pytest.raises(RunFolderError, match=name.value.replace(".", r"\.")):
        read()


def test_missing_files_are_named(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match=r"has no config\.json"):
        folder.read_json(RunFile.CONFIG)
    with pytest.raises(RunFolderError, match=r"plan\.json cannot be read"):
        folder.read_plan()
    with pytest.raises(RunFolderError, match="there is no folder"):
        RunFolder.open(tmp_path / "nowhere")


def test_what_was_written_is_read_again(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_json(RunFile.ROBUSTNESS, {"radii": (0.0, float("inf"))})
    assert folder.read_json(RunFile.ROBUSTNESS) == {"radii": [0.0, None]}
    digest = folder.write_weights(b"weights")
    assert folder.read_weights() == b"weights"
    assert folder.weights_digest() == digest
    folder.write_data_key(b"k" * 32)
    assert folder.read_data_key() == b"k" * 32
    assert stat.S_IMODE(folder.file(RunFile.DATA_KEY).stat().st_mode) == 0o600
    assert not list(folder.path.rglob(".unfinished-*"))


def test_discarding_leaves_what_is_not_ours(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_json(RunFile.CONFIG, {})
    folder.write_data_key(b"k" * 32)
    (folder.path / "notes.txt").write_text("mine")
    folder.discard()
    assert [path.name for path in folder.path.iterdir()] == ["notes.txt"]
    (folder.path / "notes.txt").unlink()
    folder.discard()
    assert not folder.path.exists()


def test_everything_measured_on_data_is_private():
    """A name that is neither released nor public must be listed; this list is written by hand."""
    public = {
        "format.json", "config.json", "environment.json", "plan.json", "ledger.jsonl",
        "model.safetensors", "bounds.json", "signal.jsonl", "report.html", "report.json",
        "deployment.json", "statistics.jsonl", "columns.json",
    }  # fmt: skip
    assert {each.value.split("/")[0] for each in RunFile} - public == PRIVATE_NAMES


def test_what_is_private_is_for_its_owner_alone(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for name in RunFile:
        if name.endswith(".json"):
            for _ in range(2):  # and so is what replaces it
                folder.write_json(name, {})
        elif name in (RunFile.METRICS, RunFile.TIGHTNESS, RunFile.SIGNAL):
            folder.log(name).begin(note="", step=0)
            folder.log(name).append({"kind": "step", "step": 1})
    (state,) = [folder.checkpoints().save({"state": b""}, step=1)]
    readable = {
        path.name
        for path in folder.path.iterdir()
        if path.stat().st_mode & 0o077 and path.is_file()
    }
    assert {"plan.json", "report.json", "signal.jsonl"} <= readable
    assert not readable & PRIVATE_NAMES
    assert {"result.json", "data.json", "audit.json", "metrics.jsonl"} <= {
        path.name for path in folder.path.iterdir()
    }
    assert not state.stat().st_mode & 0o077
