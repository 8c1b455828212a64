"""`clipless data` and `clipless bench`."""

import numpy as np
import pytest

from tests.cli.shell import ROOT, here, refused, shell


@pytest.fixture
def yeast(tmp_path):
    """A folder with a file of the form of the smallest data set, of random numbers."""
    random = np.random.default_rng(0)
    folder = tmp_path / "root" / "adbench"
    folder.mkdir(parents=True)
    x, y = random.random((1484, 8)), (np.arange(1484) % 3 == 0).astype(np.int64)
    np.savez(folder / "47_yeast.npz", X=x, y=y)
    return tmp_path / "root"


def test_list(yeast, tmp_path):
    outcome = shell("data", "list", "--root", yeast, "--json", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    rows = {row["name"]: row for row in outcome.json["datasets"]}
    assert rows["mnist"]["train_size"] == 60_000
    assert (rows["yeast"]["present"], rows["mnist"]["present"]) == (True, False)
    assert "yeast" in here("data", "list", "--root", yeast).out


def test_check(yeast, tmp_path):
    said = here("data", "check", "yeast", "--root", yeast, "--json").json
    assert (said["train_size"], said["test_size"], said["verified"]) == (1190, 294, False)
    assert here("data", "fetch", "yeast", "--root", yeast).code == 0  # it is there already
    assert refused(here("data", "check", "yeats", "--root", yeast), 2, "yeast")
    outcome = shell("data", "check", "mnist", "--root", yeast, cwd=tmp_path)
    assert refused(outcome, 3, "train-images-idx3-ubyte.gz", "CLIPLESS_DATA")
    file = yeast / "adbench" / "47_yeast.npz"
    file.write_bytes(file.read_bytes()[:1000])
    assert refused(here("data", "check", "yeast", "--root", yeast), 3, "47_yeast.npz")


def test_fetch_without_a_network(tmp_path, monkeypatch):
    """A proxy that does not answer stands for no network."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    outcome = here("data", "fetch", "yeast", "--root", tmp_path)
    assert refused(outcome, 3, "could not be downloaded", "47_yeast.npz")


def test_check_the_data_of_a_run(run):
    assert here("data", "check", run, "--json").json["same"] is True
    text = (run / "data.json").read_text().replace('"hmac_sha256": "', '"hmac_sha256": "0', 1)
    (run / "data.json").write_text(text)
    assert refused(here("data", "check", run), 5, "of other contents")


def test_bench(tmp_path):
    outcome = shell("bench", "--json", cwd=ROOT)
    assert outcome.code == 0, outcome.err
    names = {each["name"]: each["purpose"] for each in outcome.json["benchmarks"]}
    assert "private step" in names["overhead"]
    assert refused(here("bench", "underhead"), 2, "underhead", "overhead")


def test_bench_runs_one_with_its_own_arguments(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "clipless"\n')
    script = '"""Says what it was given."""\nimport sys\nprint(sys.argv[1:])\nsys.exit(3)\n'
    (tmp_path / "benchmarks" / "echo.py").write_text(script)
    outcome = shell("bench", "echo", "--batch", "5", "--json", cwd=tmp_path)
    assert (outcome.code, outcome.out) == (3, "['--batch', '5', '--json']\n")
    assert "Says what it was given." in shell("bench", cwd=tmp_path).out


def test_bench_outside_a_checkout(tmp_path):
    """As after pip install: the package is there, the benchmarks are not."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "clipless").symlink_to(ROOT / "clipless")
    outcome = shell("bench", cwd=tmp_path, PYTHONPATH=str(site))
    assert refused(outcome, 2, "checkout")
