"""The page: complete, self-contained, escaped, small, and the same as the JSON."""

import json
import re
from html.parser import HTMLParser

import pytest

from clipless.privacy import Ledger, Plan
from clipless.report import build, write_report

SECTIONS = [
    "claim", "rests", "training", "epsilon", "front", "signal", "tightness", "robustness",
    "audit", "configuration", "versions", "reproduce",
]  # fmt: skip
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
def written(run):
    report = write_report(run)
    return report, (run / "report.html").read_text()


def test_all_sections_in_order_with_headings(written):
    page = Page(written[1])
    found = [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]
    assert found == SECTIONS
    assert page.tags.count("h1") == 1
    assert page.tags.count("h2") == len(SECTIONS)
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert links == [f"#{name}" for name in SECTIONS]


def test_a_bare_run_has_the_same_sections(bare):
    write_report(bare)
    text = (bare / "report.html").read_text()
    page = Page(text)
    found = [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]
    assert found == SECTIONS
    assert text.count("Not in this run:") == 7
    assert "<code>clipless audit</code>" in text
    assert "Something is wrong" not in text


def test_every_number_of_the_page_is_in_the_json(written):
    report, text = written
    page = Page(text)
    known = numbers(report.to_dict())
    assert len(page.values) > 100
    for value in page.values:
        assert value in known
    # And the other way round for what matters most.
    for value in (report.claim.epsilon, report.claim.delta, report.claim.guess_bound_exact):
        assert value in page.values
    for layer in report.foundations.layers:
        assert layer.gradient_bound in page.values
        assert layer.noise_deviation in page.values
    for each in report.robustness["certified"][0]["accuracies"]:
        assert each in page.values


def test_every_sentence_of_the_claim_is_on_the_page(written):
    report, text = written
    shown = " ".join("".join(Page(text).text).split())
    claim = report.claim
    for part in (claim.meaning, claim.protected, claim.from_whom, claim.not_protected):
        assert part
        for sentence in part:
            assert " ".join(sentence.split()) in shown
    for sentence in claim.caveats:
        assert sentence in shown
    for check in report.checks:
        assert check.name in shown
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


def test_figures_are_named_for_those_who_cannot_see_them(written):
    page = Page(written[1])
    assert page.tags.count("svg") >= 12
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == page.tags.count("svg")
    assert all(len(label) > 20 for label in labels)
    assert page.tags.count("caption") == page.tags.count("table")


def test_figures_have_marks_inside_their_frame(written):
    """No empty plots, and nothing is drawn outside."""
    drawings = re.findall(r"<svg viewBox=\"0 0 (\d+) (\d+)\".*?</svg>", written[1], flags=re.S)
    bodies = re.findall(r"<svg .*?</svg>", written[1], flags=re.S)
    assert len(drawings) == len(bodies) >= 12
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
    text = (moved / "report.html").read_text()
    page = Page(text)
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
    report.write_html(run / "page.html")
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


def test_what_may_be_passed_on_holds_nothing_measured_on_private_data(run):
    """The parts that are marked as safe are the same for other losses and gradient norms."""
    safe = ("claim", "rests", "epsilon")

    def parts():
        text = write_report(run) and (run / "report.html").read_text()
        return [text.split(f'<section id="{name}"')[1].split("</section>")[0] for name in safe]

    before = parts()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {"loss": 0.123, "accuracy": 0.456}
    write_lines(run / "metrics.jsonl", lines)
    lines = [json.loads(line) for line in (run / "tightness.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        for each in (*line["parameters"], line["whole"]):
            each |= {"largest": 0.5, "mean": 0.25}
    write_lines(run / "tightness.jsonl", lines)
    audit = json.loads((run / "audit.json").read_text())
    audit["membership"]["attacks"][0]["auroc"]["value"] = 0.789
    (run / "audit.json").write_text(json.dumps(audit))
    assert parts() == before


def test_privacy_of_what_is_shown_is_marked(written):
    text = written[1]
    for name, words in {
        "training": "not covered by the guarantee",
        "signal": "covered by the guarantee",
        "tightness": "not covered by the guarantee",
        "epsilon": "safe to pass on",
    }.items():
        section = text.split(f'<section id="{name}"')[1].split("</section>")[0]
        assert words in re.search(r'class="badge[^>]*>([^<]*)<', section)[1]
