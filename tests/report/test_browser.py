"""The page in a real browser: it renders in light and dark and on paper, and nothing complains."""

import os
import re
import shutil
import subprocess

import pytest

from clipless.report import write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
DARK, LIGHT = 0, 1


def browse(page, tmp_path, *flags, scheme=LIGHT):
    """Open a page from the disk; return the document as it stands, and what the console said."""
    command = [
        BROWSER, "--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
        "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--log-level=0",
        f"--blink-settings=preferredColorScheme={scheme}", "--window-size=900,9000", *flags,
        page.as_uri(),
    ]  # fmt: skip
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.insert(1, "--no-sandbox")
    try:
        done = subprocess.run(command, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("Chromium does not answer on this machine")
    errors = done.stderr.decode(errors="replace")
    if done.returncode != 0:
        pytest.skip(f"Chromium does not start on this machine: {errors[-300:]}")
    return done.stdout.decode(errors="replace"), re.findall(r"CONSOLE[^\n]*", errors)


def picture(path):
    image = pytest.importorskip("matplotlib.image")
    return image.imread(path)[..., :3]


SECTIONS = 7
FIGURES = {"report.html": 3, "report-private.html": 10}


@pytest.fixture(params=list(FIGURES))
def page(run, request):
    write_report(run)
    return run / request.param


def test_a_complaint_would_be_noticed(tmp_path):
    """The test itself is tested: an error on the console, and a picture that is not there."""
    bad = tmp_path / "bad.html"
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
    bad.write_text(f"<!doctype html>{policy}<img src='file:///nowhere.png'>")
    _, console = browse(bad, tmp_path, "--dump-dom")
    assert console


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_it_renders_and_nothing_complains(page, tmp_path, scheme):
    shot = tmp_path / "shot.png"
    document, console = browse(page, tmp_path, "--dump-dom", f"--screenshot={shot}", scheme=scheme)
    assert console == []
    assert document.count("</section>") == SECTIONS
    assert document.count("</svg>") >= FIGURES[page.name]
    if not shot.exists():  # some versions do one thing at a time
        _, console = browse(page, tmp_path, f"--screenshot={shot}", scheme=scheme)
        assert console == []
    pixels = picture(shot)
    height, width, _ = pixels.shape
    assert width == 900
    assert height >= 4000
    corner = float(pixels[5, 5].mean())
    assert corner > 0.95 if scheme == LIGHT else corner < 0.15
    # Every part of the page has something on it, in colours that can be read.
    lightness = pixels.mean(axis=2)
    for top in range(0, 3500, 500):
        part = lightness[top : top + 500]
        assert abs(part - corner).max() > 0.5, f"nothing to be read from {top} on"
    # Both series colours are there: blue lines, and orange marks or areas.
    red, blue = pixels[..., 0], pixels[..., 2]
    assert ((blue - red) > 0.3).sum() > 500
    assert ((red - blue) > 0.3).sum() > (100 if page.name == "report.html" else 500)


def test_it_prints_light_on_many_pages(page, tmp_path):
    paper = tmp_path / "paper.pdf"
    _, console = browse(page, tmp_path, f"--print-to-pdf={paper}", scheme=DARK)
    assert console == []
    data = paper.read_bytes()
    assert data.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 40
    if shutil.which("pdftoppm") is None:
        return  # nothing here draws a page of it
    first = ["pdftoppm", "-r", "20", "-f", "1", "-l", "1", "-png", "-singlefile"]
    subprocess.run([*first, paper, tmp_path / "paper"], check=True)
    pixels = picture(tmp_path / "paper.png")
    assert float(pixels.mean()) > 0.8  # a dark screen, and white paper all the same
