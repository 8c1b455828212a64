"""The site, built strictly, and in a real browser at three widths (minutes: marked slow)."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("mkdocs")
ROOT = Path(__file__).parent.parent
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site without notebooks' outputs, which `make docs` makes."""
    folder = tmp_path_factory.mktemp("site")
    environment = {
        **os.environ, "CLIPLESS_SITE_NOTEBOOKS": "skip", "NO_MKDOCS_2_WARNING": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_pages_fetch_nothing_from_elsewhere(site):
    """No script, style, font or picture of another host is loaded by any page."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link\b[^>]*rel=\"?(?:stylesheet|preconnect)[^>]*>", text)
        assert not [each for each in loaded if "//" in each], page.name


def test_search_knows_the_pages(site):
    index = (site / "search" / "search_index.json").read_text("utf-8")
    for words in ("SpectralLinear", "zero-out", "choose-epsilon", "clipless audit"):
        assert words in index


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 820, 1400])
@pytest.mark.parametrize(
    "page", ["index", "guarantee", "reference/nn", "pictures", "results/speed"]
)
def test_pages_in_a_browser(address, width, page, tmp_path):
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--log-level=0", f"--window-size={width},1200",
        "--virtual-time-budget=5000", "--dump-dom", f"{address}/{page}.html",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, timeout=90)
    except subprocess.TimeoutExpired:
        pytest.skip("Chromium does not answer on this machine")
    assert re.findall(r"CONSOLE[^\n]*", done.stderr.decode(errors="replace")) == []
    document = done.stdout.decode(errors="replace")
    assert 'data-md-component="search"' in document
    if page == "index":
        assert "md-clipboard" in document or "md-code__button" in document  # made by the script
