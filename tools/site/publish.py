"""Puts a built site beside those of other versions, for the selector in the header.

python tools/site/publish.py build/site PAGES    as PAGES/1.0, with PAGES/versions.json

PAGES is what a web server shows. Its front page leads to the newest version; a version that is
published again replaces what was there. Build the site with CLIPLESS_SITE_VERSIONS=1 before.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRONT = """<!doctype html>
<meta charset="utf-8">
<title>clipless</title>
<meta http-equiv="refresh" content="0; url={folder}/">
<a href="{folder}/">clipless {version}</a>
"""


def publish(site: Path, pages: Path, version: str) -> Path:
    """Copy a site to the folder of its version; write the list of versions and the front page."""
    if not (site / "index.html").is_file():
        raise FileNotFoundError(f"{site} holds no site: run make docs")
    name = ".".join(version.split(".")[:2])
    pages.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(pages / name, ignore_errors=True)
    shutil.copytree(site, pages / name)
    place = pages / "versions.json"
    known = json.loads(place.read_text(encoding="utf-8")) if place.exists() else []
    titles = {each["version"]: each["title"] for each in known} | {name: version}
    order = sorted(titles, key=lambda each: [int(part) for part in each.split(".")], reverse=True)
    listed = [
        {"version": each, "title": titles[each], "aliases": ["latest"] if each == order[0] else []}
        for each in order
    ]
    place.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    front = FRONT.format(folder=order[0], version=titles[order[0]])
    (pages / "index.html").write_text(front, encoding="utf-8")
    (pages / ".nojekyll").touch()  # GitHub is to show the files as they are
    return pages / name


if __name__ == "__main__":
    text = (ROOT / "clipless" / "_version.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'__version__ = "(.+)"', text)
    print(publish(Path(sys.argv[1]), Path(sys.argv[2]), found))
