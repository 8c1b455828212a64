"""The site, built strictly, and used in a real browser at three widths (minutes: marked slow).

`CLIPLESS_SITE=build/site` looks at a site that is there, notebooks and all: `make docs` does.
"""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, Browser, NoBrowserError
from tests.test_site import tool

pytestmark = pytest.mark.slow
pytest.importorskip("mkdocs")
ROOT = Path(__file__).parent.parent
WIDTHS = (390, 820, 1440)
publish = tool("publish").publish
SEEN = [
    "index", "start", "guarantee", "reference/nn", "reference/commands", "pictures",
    "results/speed", "results/images", "notebooks/5_certificates", "paper",
]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site that is there, or one without notebooks' outputs, which take minutes."""
    if there := os.environ.get("CLIPLESS_SITE"):
        return ROOT / there
    folder = tmp_path_factory.mktemp("site")
    environment = {
        **os.environ, "CLIPLESS_SITE_NOTEBOOKS": "skip", "NO_MKDOCS_2_WARNING": "1",
        "CLIPLESS_SITE_VERSIONS": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def address(site, tmp_path_factory):
    """The site as it is published: beside an older version of itself."""
    pages = tmp_path_factory.mktemp("pages")
    for version in ("0.9.0", "1.0.0"):
        publish(site, pages, version)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(pages))
    handler.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/1.0"
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


@pytest.fixture
def browser(tmp_path):
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    try:
        found = Browser(tmp_path / "profile")
    except NoBrowserError as error:
        pytest.skip(f"Chromium does not run on this machine: {error}")
    yield found
    found.close()


def test_a_complaint_would_be_noticed(browser, tmp_path):
    """The test itself is tested: an error of a script, one on the console, a file that lacks."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><script>console.error('said')</script><img src='missing.png'>"
        "<script>nothing.there</script>"
    )
    browser.open(page.as_uri())
    complaints = " ".join(browser.complaints)
    for words in ("said", "nothing is not defined", "missing.png"):
        assert words in complaints


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_fit_and_nothing_complains(browser, address, width, dark):
    for page in SEEN:
        browser.open(f"{address}/{page}.html", width=width, dark=dark)
        scheme = browser.value("document.body.getAttribute('data-md-color-scheme')")
        assert scheme == ("slate" if dark else "default")
        # What is too wide scrolls by itself; the page does not.
        assert browser.value(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        ), page
        lost = browser.value(
            "[...document.images].filter(each => each.getClientRects().length && "
            "!(each.complete && each.naturalWidth)).map(each => each.src)"
        )
        assert lost == [], page
        column = browser.value("document.querySelector('article').clientWidth")
        assert 300 <= column <= 900, f"{page}: lines of {column} pixels"
    assert browser.complaints == []


def test_navigation_is_clicked_through(browser, address):
    """Every tab of a wide page, and the drawer of a phone."""
    browser.open(f"{address}/index.html", width=1440)
    tabs = browser.value(
        "[...document.querySelectorAll('.md-tabs__link')].map(each => each.textContent.trim())"
    )
    assert tabs == ["Start", "Tutorials", "How-to", "Concepts", "Reference", "Results", "About"]
    for number, name in enumerate(tabs, 1):
        browser.click(f".md-tabs__item:nth-child({number}) .md-tabs__link")
        browser.until(
            f"document.querySelector('.md-tabs__item--active')?.textContent.trim() == {name!r}"
        )
        assert browser.until("document.querySelector('article h1')?.textContent")
    browser.open(f"{address}/index.html", width=390)
    browser.click("label[for=__drawer].md-header__button")
    browser.until("document.querySelector('#__drawer').checked")
    browser.click(".md-nav--primary a[href='start.html']")
    browser.until("location.pathname.endsWith('/start.html')")
    browser.until("document.querySelector('article h1').textContent.startsWith('Five minutes')")
    assert browser.complaints == []


@pytest.mark.parametrize("width", WIDTHS)
def test_search_finds_a_public_name(browser, address, width):
    browser.open(f"{address}/faq.html", width=width)
    if width < 960:
        browser.click("label[for=__search].md-header__button")
    browser.click(".md-search__input")
    browser.write("FrobeniusLinear")
    browser.click(".md-search-result__link[href*='reference/nn']")
    browser.until("location.pathname.endsWith('/reference/nn.html')")
    assert "FrobeniusLinear" in browser.until("document.querySelector('article')?.textContent")
    assert browser.complaints == []


def test_code_is_copied_and_the_scheme_is_kept(browser, address):
    browser.call(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    browser.open(f"{address}/start.html")
    code = browser.until("document.querySelector('.highlight code')?.textContent")
    browser.click(".md-clipboard, .md-code__button[data-md-type=copy]")
    browser.until("document.querySelector('.md-dialog')?.textContent.includes('Copied')")
    assert browser.value("navigator.clipboard.readText()") == code.rstrip("\n")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    assert browser.value(scheme) == "default"
    browser.click(".md-header__option label:not([hidden])")
    browser.until(f"{scheme} === 'slate'")
    browser.open(f"{address}/faq.html")
    assert browser.value(scheme) == "slate"
    assert browser.complaints == []


def test_an_older_version_is_chosen(browser, address, site):
    if '"version"' not in (site / "index.html").read_text("utf-8"):
        pytest.skip("this site was built without CLIPLESS_SITE_VERSIONS=1")
    browser.open(f"{address}/faq.html")
    browser.click(".md-version__current")
    browser.click(".md-version__link[href*='/0.9/']")
    browser.until("location.pathname.startsWith('/0.9/')")
    assert browser.complaints == []


@pytest.mark.parametrize(
    "source", sorted((ROOT / "docs" / "notebooks").glob("*.py")), ids=lambda path: path.stem
)
def test_notebooks_run(source, tmp_path):
    """Each runs to its end in a process of its own, prints, and draws something to look at."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "site" / "notebooks.py", source, tmp_path],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'title="Output"' in (tmp_path / "page.md").read_text("utf-8")
    assert list(tmp_path.glob("*.light.svg"))
