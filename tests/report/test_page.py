"""The page: complete, self-contained, escaped, small, and the same as the JSON."""

import json
import re
from html.parser import HTMLParser

import pytest

from clipless.privacy import Ledger, Plan
from clipless.report import build, write_report

SECTIONS = {
    "public": [
        "claim", "rests", "epsilon", "signal", "configuration", "versions", "reproduce",
    ],
    "private": [
        "checks", "training", "front", "tightness", "robustness", "audit", "settings",
    ],
}  # fmt: skip
FILES = {"public": "report.html", "private": "report-private.html"}
VOID = {"meta", "link", "br"}
HOSTILE = "</pre><script>alert('x')</script><img src=http://evil/x onerror=y>\"'&`{{ 7*7 }}"


class Page(HTMLParser):
    """What a reader of the page relies on: balanced tags, and what is inside."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.values, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag == "data":
            self.values.append(json.loads(dict(attributes)["value"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def numbers(data):
    if isinstance(data, dict):
        return {each for value in data.values() for each in numbers(value)}
    if isinstance(data, list):
        return {each for value in data for each in numbers(value)}
    return {data} if data is None or isinstance(data, int | float) else set()


@pytest.fixture
def both(run):
    """The report, and its two pages by kind."""
    report = write_report(run)
    return report, {kind: (run / name).read_text() for kind, name in FILES.items()}


@pytest.fixture(params=list(FILES))
def written(both, request):
    return both[0], both[1][request.param]


def sections(text):
    page = Page(text)
    return [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]


@pytest.mark.parametrize("kind", list(FILES))
def test_all_sections_in_order_with_headings(both, kind):
    text = both[1][kind]
    page = Page(text)
    assert sections(text) == SECTIONS[kind]
    assert page.tags.count("h1") == 1
    assert page.tags.count("h2") == len(SECTIONS[kind])
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert links == [f"#{name}" for name in SECTIONS[kind]]


def test_a_bare_run_has_the_same_sections(bare):
    write_report(bare)
    texts = {kind: (bare / name).read_text() for kind, name in FILES.items()}
    for kind, text in texts.items():
        assert sections(text) == SECTIONS[kind]
        assert "Something is wrong" not in text
    assert texts["public"].count("Not in this run:") == 4
    assert texts["private"].count("Not in this run:") == 3
    assert "<code>clipless audit</code>" in texts["private"]


def test_every_number_of_a_page_is_in_its_json(both):
    report, texts = both
    pages = {kind: Page(text) for kind, text in texts.items()}
    for kind, page in pages.items():
        known = numbers(report.to_dict(private=kind == "private"))
        assert len(page.values) > 50
        for value in page.values:
            assert value in known
    # And the other way round for what matters most.
    shown = pages["public"].values
    for value in (report.claim.epsilon, report.claim.delta, report.claim.guess_bound_exact):
        assert value in shown
    for layer in report.foundations.layers:
        assert layer.gradient_bound in shown
        assert layer.noise_deviation in shown
    for each in report.robustness["certified"][0]["accuracies"]:
        assert each in pages["private"].values


def test_every_sentence_of_the_claim_is_on_the_page(both):
    report, text = both[0], both[1]["public"]
    shown = " ".join("".join(Page(text).text).split())
    claim = report.claim
    for part in (claim.meaning, claim.protected, claim.from_whom, claim.not_protected):
        assert part
        for sentence in part:
            assert " ".join(sentence.split()) in shown
    for sentence in claim.caveats:
        assert sentence in shown
    for check in report.checks:
        assert check.name in both[1]["private" if check.private else "public"]
        assert check.private or check.name in shown
    for heading in ("What is protected", "From whom", "What is not protected"):
        assert heading in shown


def test_nothing_comes_from_elsewhere(written):
    page = Page(written[1])
    for _, name, value in page.attributes:
        if name in ("src", "href", "action", "data", "srcset", "xlink:href"):
            assert value.startswith(("#", "data:,"))
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", written[1])
    assert not re.search(r"@import|url\(", written[1])
    assert "script" not in page.tags
    policy = [v for t, n, v in page.attributes if (t, n) == ("meta", "content") and "'none'" in v]
    assert policy  # a browser would refuse what slipped through


LEAST_FIGURES = {"public": 2, "private": 10}


@pytest.mark.parametrize("kind", list(FILES))
def test_figures_are_named_for_those_who_cannot_see_them(both, kind):
    page = Page(both[1][kind])
    assert page.tags.count("svg") >= LEAST_FIGURES[kind]
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == page.tags.count("svg")
    assert all(len(label) > 20 for label in labels)
    assert page.tags.count("caption") == page.tags.count("table")


@pytest.mark.parametrize("kind", list(FILES))
def test_figures_have_marks_inside_their_frame(both, kind):
    """No empty plots, and nothing is drawn outside."""
    text = both[1][kind]
    drawings = re.findall(r"<svg viewBox=\"0 0 (\d+) (\d+)\".*?</svg>", text, flags=re.S)
    bodies = re.findall(r"<svg .*?</svg>", text, flags=re.S)
    assert len(drawings) == len(bodies) >= LEAST_FIGURES[kind]
    for (width, height), body in zip(drawings, bodies, strict=True):
        assert re.search(r'class="(mark|line|area) s\d', body)
        assert "nan" not in body.lower().replace("finance", "")
        for name, limit in (("x", width), ("y", height), ("cx", width), ("cy", height)):
            for value in re.findall(rf' {name}="(-?[\d.]+)"', body):
                assert -1 <= float(value) <= float(limit) + 1


def test_hostile_strings_stay_text(run):
    """In a configuration, a folder name, a label of the ledger, a layer's name, an error."""
    config = {"name": HOSTILE, HOSTILE: [HOSTILE, {"deep": HOSTILE}]}
    (run / "config.json").write_text(json.dumps(config))
    (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE, "many": [HOSTILE]}))
    audit = json.loads((run / "audit.json").read_text())
    audit["membership"]["attacks"][0]["name"] = HOSTILE
    audit[HOSTILE] = audit.pop("one_run")
    (run / "audit.json").write_text(json.dumps(audit))
    lines = [json.loads(line) for line in (run / "signal.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["parameters"][0]["name"] = HOSTILE
    (run / "signal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    moved = run.rename(run.with_name("<b>bold<"))
    report = write_report(moved)
    assert not report.problems
    for name in FILES.values():
        page = Page((moved / name).read_text())
        assert not {"script", "img", "b"} & set(page.tags)
        assert not [name for _, name, _ in page.attributes if name.startswith("on")]
        assert HOSTILE in "".join(page.text)
    assert json.loads((moved / "report.json").read_text())["configuration"] == config


def test_a_long_run_of_a_deep_network_stays_small(run):
    """300 epochs and 400 parameters: under 3 MB, with tables that say what they leave out."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epoch = next(line for line in metrics if line["kind"] == "epoch")
    many = [{**epoch, "epoch": e, "step": e, "loss": 1 / e} for e in range(1, 301)]
    write_lines(run / "metrics.jsonl", [metrics[0], *many])
    for name in ("signal.jsonl", "tightness.jsonl"):
        found = [json.loads(line) for line in (run / name).read_text().splitlines()]
        for line in found[1:]:
            first = line["parameters"][0]
            line["parameters"] = [{**first, "name": f"block.{i}.weight"} for i in range(400)]
        write_lines(run / name, found)
    plan = Plan.from_dict(json.loads((run / "plan.json").read_text())["plan"])
    with Ledger(run / "ledger.jsonl") as ledger:
        ledger.reserve(plan.mechanism, count=276)
        for _ in range(276):
            ledger.spend(plan.mechanism)
    report = build(run)
    assert report.claim.standing == "stated"
    for private in (False, True):
        report.write_html(run / "page.html", private=private)
        text = (run / "page.html").read_text()
        assert len(text.encode()) < 1_500_000
        Page(text)
    assert "200 of 300 are shown" in text
    assert "The first 24 of 400 parameters are drawn" in text
    assert len(report.training.epochs) == 300
    costs = [each.epsilon for each in report.training.epochs]
    assert costs == sorted(costs)
    assert len(set(costs)) > 40
    assert costs[-1] == report.claim.epsilon


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_private_files(run):
    """Give a run other losses, gradients, audits, certified accuracies, results and digests."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {"loss": 0.123, "accuracy": 0.456, "validation_accuracy": 0.321}
    write_lines(run / "metrics.jsonl", lines)
    lines = [json.loads(line) for line in (run / "tightness.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        for each in (*line["parameters"], line["whole"]):
            each |= {"largest": 0.5, "mean": 0.25}
    write_lines(run / "tightness.jsonl", lines[:2])
    audit = json.loads((run / "audit.json").read_text())
    audit["membership"]["attacks"][0]["auroc"]["value"] = 0.789
    del audit["one_run"]
    (run / "audit.json").write_text(json.dumps(audit))
    (run / "robustness.json").unlink()
    (run / "result.json").write_text(json.dumps({"metrics": {"accuracy": 0.654}, "seconds": 3}))
    (run / "data.json").write_text(json.dumps({"train": {"size": 100, "hmac_sha256": "0" * 64}}))


def public_page(run):
    report = write_report(run)
    data = json.loads((run / "report.json").read_text())
    written = data.pop("written")
    page = (run / "report.html").read_text()
    return page.replace(written.replace("T", " ").replace("+00:00", " UTC"), ""), data, report


def test_the_public_page_is_a_function_of_public_files(run):
    """Not a byte of it changes with what was measured on data."""
    before, private = public_page(run), (run / "report-private.html").read_text()
    other_private_files(run)
    after = public_page(run)
    assert after[:2] == before[:2]
    assert (run / "report-private.html").read_text() != private
    for name in ("metrics.jsonl", "tightness.jsonl", "audit.json", "result.json", "data.json"):
        (run / name).unlink()
    assert public_page(run)[:2] == before[:2]


def test_nothing_measured_is_on_the_public_page(both, run):
    """No loss, accuracy, quotient or attack: not in figures, tables, titles or JSON."""
    report, texts = both
    measured = numbers(
        {
            "training": [
                {name: each[name] for name in ("loss", "accuracy", "validation_loss")}
                for each in report.to_dict(private=True)["training"]["epochs"]
            ],
            "tightness": [each["mean"] for each in report.tightness["end"]["parameters"]],
            "audit": [each["auroc"] for each in report.audit["membership"][0]["attacks"]],
        }
    )
    # Round figures, such as an accuracy of 0.4, stand in other numbers as well.
    measured = {each for each in measured - {None} if len(f"{each:.6g}") > 5}
    assert len(measured) > 10
    public = numbers(report.to_dict()) | set(Page(texts["public"]).values)
    assert not measured & public
    text = texts["public"] + (run / "report.json").read_text()
    for words in ("training loss", "AUROC", "certified accuracy", "validation accuracy"):
        assert words not in text
    for value in measured:
        assert f"{value:.6g}" not in text


def test_seeds_are_not_on_the_public_page(run):
    config = {
        "training": {"steps": 24, "seed": 918273, "nested": [{"insecure_seed": 918274}]},
        "data": {"name": "small", "split_seed": 918275},
        "model": {"random_state": 918276},
    }
    (run / "config.json").write_text(json.dumps(config))
    report = write_report(run)
    for name in ("report.html", "report.json"):
        text = (run / name).read_text()
        assert "91827" not in text
        assert '"steps": 24' in text.replace("&#34;", '"')
    assert report.configuration == config
    assert "918273" in (run / "report-private.html").read_text()


def test_every_section_of_the_private_page_is_marked(both):
    text = both[1]["private"]
    assert "Do not publish this page" in text.split("<main>")[0]
    parts = text.split("<section ")[1:]
    assert len(parts) == len(SECTIONS["private"])
    for part in parts:
        assert 'class="private"' in part.split(">")[0]
        mark = re.search(r'class="badge bare">([^<]*)<', part)[1]
        assert mark.startswith("Private: ")
        assert "do not publish" in mark
    exact = "Private: computed from the training data without noise; do not publish."
    assert text.count(exact) == 5


def test_the_public_page_says_what_covers_it(both):
    text = both[1]["public"]
    assert "bare" not in re.sub(r"<style>.*?</style>", "", text, flags=re.S)
    for name, words in {"signal": "covered by the guarantee", "epsilon": "safe to pass on"}.items():
        section = text.split(f'<section id="{name}"')[1].split("</section>")[0]
        assert words in re.search(r'class="badge[^>]*>([^<]*)<', section)[1]


def test_the_claim_names_the_assumption_about_the_generator(both):
    text = " ".join("".join(Page(both[1]["public"]).text).split())
    assert "any amount of computing power" not in text
    assert "pseudo-random" in text
    assert "cannot predict the random generator" in text
