"""Figures in README and docs are those of the committed results, computed anew from the JSON."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def load(name):
    data = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
    return data["results"] if isinstance(data, dict) and "results" in data else data


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


def rows_of(text, heading):
    """The cells of the rows below a table's heading."""
    lines = text[text.index(heading) :].splitlines()[2:]
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


SPEED = {(row["model"], row["batch"], row["method"], row["mode"]): row for row in load("speed-gpu")}
SPEED_CPU = {
    (row["model"], row["batch"], row["method"], row["mode"]): row for row in load("speed-cpu")
}


def time_of(method, mode, batch, table=SPEED, model="cnn-400K"):
    return table[model, batch, method, mode]["milliseconds"]


def ratio(mode, batch, table=SPEED):
    return time_of("clipless", mode, batch, table) / time_of("nonprivate-relu", mode, batch, table)


def auroc(method, dataset=None):
    found = {}
    for row in load("tabular"):
        if row["method"] == method and dataset in (None, row["dataset"]):
            found.setdefault(row["dataset"], []).append(row["auroc"])
    return statistics.mean(statistics.mean(values) for values in found.values())


def images(recipe):
    found = [row["accuracy"] for row in load("images") if row["recipe"] == recipe]
    return 100 * statistics.mean(found)


def certified(epsilon, radius, temperature=None):
    """Certified accuracy at a radius times 255: of one temperature, or of the best."""
    found = {}
    for row in load("images-certificates"):
        if round(row["epsilon"]) == epsilon and temperature in (None, row["temperature"]):
            value = row["certified"][row["radii_of_255"].index(radius)]
            found.setdefault(row["temperature"], []).append(value)
    return 100 * max(map(statistics.mean, found.values()))


def opacus(key, best):
    ours = SPEED["cnn-400K", 2048, "clipless", "compiled"][key]
    kinds = ("opacus-hooks", "opacus-ghost")
    return best(SPEED["cnn-400K", 2048, kind, "eager"][key] for kind in kinds) / ours


def largest_batches():
    about = json.loads((ROOT / "benchmarks/results/speed-gpu.about.json").read_text("utf-8"))
    found = {row["method"]: row["largest_batch"] for row in about["largest_batches"]}
    return found["clipless"] / max(v for k, v in found.items() if k.startswith("opacus"))


overhead = load("overhead-cpu")
bfloat16 = ratio("bfloat16", 2048)
ROWS = [
    ("One H200, compiled", [
        "batch 512: {:.2f}; 2,048: {:.2f}; 16,384: {:.2f}".format(
            *(ratio("compiled", batch) for batch in (512, 2048, 16384))),
        "eager, batch 512: {:.2f}; bfloat16: {:.2f}".format(ratio("eager", 512), bfloat16),
    ]),
    ("Two CPU cores", [
        "compiled: {:.2f}".format(ratio("compiled", 1024, SPEED_CPU)),
        "eager: {:.2f}".format(ratio("eager", 1024, SPEED_CPU)),
    ]),
    ("paper's MNIST CNN, two CPU cores", [
        "{:.2f}".format(overhead["private_over_plain"]),
        "with product clipping {:.2f}".format(
            overhead["private_over_plain"] * overhead["product_clipping_over_private"]),
    ]),
    ("Best mode of Opacus over ours", [
        "time {:.1f}, memory {:.1f}, a {:.0f} times smaller largest batch".format(
            opacus("milliseconds", min), opacus("peak_gib", min), largest_batches()),
    ]),
    ("Tables, epsilon 1", [
        "mean of eight {:.1f} (tuned Opacus {:.1f})".format(auroc("clipless"), auroc("opacus")),
        "ALOI {:.1f} ({:.1f}); celeba {:.1f} ({:.1f})".format(
            auroc("clipless", "ALOI"), auroc("opacus", "ALOI"),
            auroc("clipless", "celeba"), auroc("opacus", "celeba")),
    ]),
    ("Images by scattering, epsilon 3", [
        "MNIST {:.1f}%, Fashion-MNIST {:.1f}%".format(
            images("mnist-scattering-epsilon3"), images("fashion-mnist-epsilon3")),
        "CIFAR-10 {:.1f}%; at epsilon 1 {:.1f}%".format(
            images("cifar10-epsilon3"), images("cifar10-epsilon1")),
    ]),
    ("with a prior from random processes", [
        "at epsilon 8 {:.1f}%, at 3 {:.1f}%".format(
            images("cifar10-random-prior-epsilon8"), images("cifar10-random-prior-epsilon3")),
        "at epsilon 1 {:.1f}%".format(images("cifar10-random-prior-epsilon1")),
    ]),
    ("MNIST, Lipschitz LeNet", [
        "{:.1f}%".format(100 * statistics.mean(row["accuracy"] for row in load("mnist"))),
    ]),
    ("CIFAR-10, certified", [
        f"radius 0: {certified(20, 0):.1f}%",
        f"4/255: {certified(20, 4):.1f}%; 16/255: {certified(20, 16):.1f}%",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("label", "texts"), ROWS, ids=[label for label, _ in ROWS])
def test_readme(label, texts):
    (line,) = [each for each in README.splitlines() if each.startswith("|") and label in each]
    for text in texts:
        assert text in line, f"README.md, {label}: the results say '{text}'"


def test_every_row_of_the_readme_is_compared_or_says_which_test_measures_it():
    for line in rows_of(README, "| measured |"):
        compared = any(label in line[0] for label, _ in ROWS)
        assert compared or "pytest" in line[-1] or "demo" in line[-1], line[0]


def test_no_figure_in_the_readme_without_its_command():
    for line in rows_of(README, "| measured |"):
        assert re.search(r"`(python|pytest|make) ", line[-1]), line[0]


def test_the_speed_page():
    columns = ["nonprivate-relu", "nonprivate-relu", "clipless", "clipless", "opacus-hooks",
               "opacus-ghost"]  # fmt: skip
    modes = ["eager", "compiled", "eager", "compiled", "eager", "eager"]
    found = list(rows_of(page("speed"), "| batch | ReLU eager |"))
    assert len(found) >= 5
    for cells in found:
        batch = int(cells[0].replace(",", ""))
        for cell, method, mode in zip(cells[1:7], columns, modes, strict=True):
            if cell:
                milliseconds, memory = map(float, cell.split(","))
                row = SPEED["cnn-400K", batch, method, mode]
                assert milliseconds == pytest.approx(row["milliseconds"], rel=0.005)
                assert memory == pytest.approx(row["peak_gib"], abs=0.006, rel=0.005)
        assert float(cells[7]) == pytest.approx(ratio("compiled", batch), abs=0.0051)
        assert float(cells[8]) == pytest.approx(ratio("eager", batch), abs=0.0051)


def test_the_worst_rows_are_on_the_speed_page():
    text = " ".join(page("speed").split())
    ours, theirs = (time_of(method, "bfloat16", 2048) for method in ("clipless", "nonprivate-relu"))
    assert f"{ours:.2f} ms at 2,048 (ReLU: {theirs:.2f}), {bfloat16:.2f} times as much" in text
    eager = ratio("eager", 1024, SPEED_CPU), ratio("compiled", 1024, SPEED_CPU)
    assert f"which is {eager[0]:.2f} and {eager[1]:.2f} times as much" in text


def test_the_page_on_images():
    names = {"MNIST": "mnist-scattering", "Fashion-MNIST": "fashion-mnist",
             "CIFAR-10 (a JPEG copy)": "cifar10",
             "CIFAR-10, prior from random processes": "cifar10-random-prior"}  # fmt: skip
    compared = 0
    for cells in rows_of(page("images"), "| | epsilon 1 | epsilon 3 |"):
        for epsilon, cell in zip((1, 3, 8), cells[1:4], strict=True):
            if cell:
                said = float(cell.split("±")[0])
                assert said == pytest.approx(
                    images(f"{names[cells[0]]}-epsilon{epsilon}"), abs=0.0051
                )
                compared += 1
    assert compared == 10
    for cells in rows_of(page("images"), "| epsilon, temperature |"):
        if "," in cells[0] and cells[0][0].isdigit():
            epsilon, temperature = map(int, cells[0].split(","))
            for radius, cell in zip((0, 1, 2, 4, 8, 16), cells[1:7], strict=True):
                assert float(cell) == pytest.approx(
                    certified(epsilon, radius, temperature), abs=0.051
                )


def test_the_page_on_scaling():
    results = load("scaling-model")
    noise = list(rows_of(page("scaling"), "| examples | batch | steps |"))
    assert len(noise) == len(results["noise"])
    for cells, row in zip(noise, results["noise"], strict=True):
        assert int(cells[0].replace(",", "")) == row["examples"]
        assert float(cells[4]) == pytest.approx(row["noise_multiplier"], rel=0.005)
        assert float(cells[5]) == pytest.approx(row["noise_of_an_update"], rel=0.02)
    times = {row["gpus"]: row for row in results["steps_on_gpus"]}
    for cells in rows_of(page("scaling"), "| GPUs | seconds a step |"):
        row = times[int(cells[0].replace(",", ""))]
        assert float(cells[1]) == pytest.approx(row["total"], rel=0.01)
        assert float(cells[3].strip("%")) == pytest.approx(100 * row["efficiency"], abs=0.51)


def test_the_picture_of_the_readme_shows_the_results():
    """The numbers that stand in the drawing; where its points lie, only drawing it anew tells."""
    drawn = (ROOT / "docs" / "pictures" / "overview.light.svg").read_text("utf-8")
    for method, mode in (("clipless", "eager"), ("clipless", "compiled"),
                         ("opacus-hooks", "eager"), ("opacus-ghost", "eager")):  # fmt: skip
        assert f"{time_of(method, mode, 2048):.1f}" in drawn, "python tools/site/pictures.py"


def test_the_page_on_the_paper():
    """Its tables are what the command of the page prints."""
    printed = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "paper.py"), "--markdown"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    begin, end = "<!-- benchmarks/paper.py --markdown: -->", "<!-- end of benchmarks/paper.py -->"
    shown = page("paper").split(begin)[1].split(end)[0]
    assert shown.strip() == printed.strip()


def test_an_item_of_the_paper_that_is_not_here_is_refused_with_where_to_look():
    command = [sys.executable, str(ROOT / "benchmarks" / "paper.py"), "--table", "99"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 2
    assert "--list" in outcome.stderr
