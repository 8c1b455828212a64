"""The documentation site, as far as it can be checked without building it: see `make docs`."""

import ast
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.py"))


def tool(name):
    """A module of the site's tools, which live outside of packages."""
    path = ROOT / "tools" / "site" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"site_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.path[:0] = [str(path.parent)]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


class Loader(yaml.SafeLoader):
    """The configuration's own tags are of no interest here."""


def navigation():
    def flat(entries):
        for entry in entries:
            value = entry if isinstance(entry, str) else next(iter(entry.values()))
            yield from flat(value) if isinstance(value, list) else [value]

    return list(flat(yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)["nav"]))


GENERATED = re.compile(
    r"changelog\.md|results/[\w-]+\.md|reference/[\w-]+\.md|notebooks/[\w-]+\.md|examples/[\w-]+\.md"
)


def is_generated(path):
    """Whether a page or a picture will be there once the site is built."""
    place = path.relative_to(DOCS.resolve()).as_posix() if DOCS.resolve() in path.parents else ""
    if place.startswith("notebooks/"):
        return path.with_suffix(".py").exists()
    if place.startswith("reference/") and place != "reference/commands.md":
        return path.stem == "index" or (ROOT / "clipless" / path.stem / "__init__.py").exists()
    if place.startswith("results/"):
        return path.stem == "index" or bool(
            list((ROOT / "benchmarks" / "results").glob(f"{path.stem}*.json"))
        )
    if place.startswith("pictures/"):
        drawn = path.with_name(f"{path.stem}.light.svg").exists()
        return drawn or f'"{path.stem}":' in (ROOT / "tools/site/pictures.py").read_text("utf-8")
    return GENERATED.fullmatch(place) is not None


def anchors(path):
    """The places within a page that a link can name."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.S | re.M)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain)).strip("-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists() or is_generated(path), f"{page.name}: {target}"
        if anchor and path.exists() and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name}: {target} is no heading there"


def test_every_page_has_its_place_in_the_navigation():
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    listed = [each for each in navigation() if each != "..."]
    assert len(listed) == len(set(listed))
    lost = pages - set(listed)
    assert not lost, f"write into `nav:` of mkdocs.yml where readers will find {sorted(lost)}"
    for name in set(listed) - pages:
        assert is_generated((DOCS / name).resolve()), f"mkdocs.yml names {name}, which is not there"


def test_nothing_is_fetched_from_elsewhere():
    """No fonts, scripts or styles of other hosts: the site works without a network."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    assert config["theme"]["font"] is False
    assert config["strict"] is True
    assert "mermaid" not in str(config)
    for name in (*config.get("extra_css", ()), *config.get("extra_javascript", ())):
        assert "//" not in name
        assert (DOCS / name).exists()


def test_public_names_have_docstrings():
    assert tool("reference").undocumented() == []


def test_the_reference_has_a_page_for_every_room():
    reference = tool("reference")
    rooms = set(reference.rooms())
    assert {"nn", "losses", "privacy", "training", "sklearn", "plots"} <= rooms
    assert set(reference.INSIDE) <= rooms
    # What a room hands on from another is documented there, once.
    assert reference.homes("privacy")["Mechanism"] == "clipless.accounting"


def test_every_command_is_in_the_reference():
    from typer.main import get_command

    from clipless.cli._app import app

    text = tool("commands").page()
    for name, command in get_command(app).commands.items():
        assert f"## clipless {name}" in text
        for parameter in command.params:
            if not parameter.hidden and parameter.param_type_name != "argument":
                assert f"`{parameter.opts[0]}`" in text


def test_results_are_means_over_seeds():
    results = tool("results")
    rows = [
        {"dataset": "a", "epsilon": 1.0, "seed": k, "accuracy": 0.5 + k / 100} for k in range(3)
    ]
    (merged,) = results.mean_over_seeds(rows)
    assert merged["seeds"] == 3
    assert merged["accuracy"] == "0.51 (0.5 to 0.52)"
    titles = [title for title, _, _ in results.pages()]
    assert "Tables" in titles
    for _, _, text in results.pages()[1:]:
        assert "    python " in text  # no figure without its command


@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda source: source.stem)
def test_notebooks_compile_and_begin_with_a_title(source):
    notebooks = tool("notebooks")
    found = list(notebooks.cells(source.read_text("utf-8")))
    assert found[0][0] == "markdown"
    assert found[0][1].startswith("# ")
    for kind, text in found:
        if kind == "code":
            ast.parse(text)


CELLS = """# %% [markdown]
# # Title
# text

# %%
x = 2
print('one')
x + 1

# %%
from clipless.plots import new_figure
new_figure()[0]
"""


def test_cells_print_draw_and_fail(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools" / "site")
    notebooks = tool("notebooks")
    source = tmp_path / "small.py"
    source.write_text(CELLS)
    page = notebooks.execute(source, tmp_path)
    assert "# Title\ntext" in page
    assert 'title="Output"\none\n3\n```' in page
    assert "(small-1.light.svg#only-light)" in page
    light, dark = ((tmp_path / f"small-1.{each}.svg").read_text() for each in ("light", "dark"))
    assert light.count("#") == dark.count("#")
    assert light != dark
    source.write_text("# %% [markdown]\n# # Title\n\n# %%\n1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        notebooks.execute(source, tmp_path)


def test_text_of_figures_can_be_read_on_dark_pages():
    from clipless.plots import new_figure

    drawing = tool("drawing")
    figure, (axes,) = new_figure()
    axes.plot([1, 2], label="named")
    axes.legend()  # black, which matplotlib leaves out of the file
    drawn = drawing.save(figure, "small")
    assert "text {fill: #24292f}" in drawn["small.light.svg"]
    assert "text {fill: #e3e6ea}" in drawn["small.dark.svg"]


def test_lists_are_read_as_on_a_forge():
    hook = tool("hook")
    text = "Words:\n- one\n  goes on\n  - below\n- two\n\n```\n- code\n```\n"
    expected = "Words:\n\n- one\n    goes on\n    - below\n- two\n\n```\n- code\n```\n"
    assert hook.github_lists(text) == expected


def test_docstring_examples_become_blocks_of_code():
    pytest.importorskip("griffe")
    fenced = tool("docstrings").fenced
    text = "Say it.\n\nExample:\n    >>> 1 + 1\n    2\n\nThe end."
    assert fenced(text) == (
        "Say it.\n\nExample:\n    ```pycon\n    >>> 1 + 1\n    2\n    ```\n\nThe end."
    )


def test_links_out_of_the_docs_are_those_that_the_site_can_follow():
    """Programs and results become pages of the site; nothing else outside of `docs/` is there."""
    followed = re.compile(r"(\.\./)+(benchmarks/results/[\w.-]+|examples/\w+\.py)")
    for page in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\((\.\./[^)#]*)", page.read_text("utf-8")):
            inside = DOCS.resolve() in (page.parent / link).resolve().parents
            assert inside or followed.fullmatch(link), f"{page.name}: {link}"
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", changelog):
        assert link.startswith("docs/"), link


def test_the_release_check_tries_every_extra_of_users():
    release = ROOT / "tools" / "release"
    spec = importlib.util.spec_from_file_location("release_smoke", release / "smoke.py")
    smoke = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smoke)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"test", "dev", "docs", "release"}
    assert set(smoke.TESTS) == extras | {"core"}


def test_versions_of_the_site_stand_beside_each_other(tmp_path):
    publish = tool("publish").publish
    with pytest.raises(FileNotFoundError, match="make docs"):
        publish(tmp_path / "site", tmp_path / "pages", "1.0.0")
    (tmp_path / "site").mkdir()
    pages = tmp_path / "pages"
    for version in ("1.0.0", "1.10.0", "1.9.2", "1.0.1"):
        (tmp_path / "site" / "index.html").write_text(version)
        assert publish(tmp_path / "site", pages, version).parent == pages
    listed = json.loads((pages / "versions.json").read_text("utf-8"))
    assert [(each["version"], each["title"]) for each in listed] == [
        ("1.10", "1.10.0"), ("1.9", "1.9.2"), ("1.0", "1.0.1"),
    ]  # fmt: skip
    assert [each["aliases"] for each in listed] == [["latest"], [], []]
    assert (pages / "1.0" / "index.html").read_text() == "1.0.1"
    assert "1.10/" in (pages / "index.html").read_text()
