"""Everything that a release must be: packages, their metadata, and fresh installations that work.

python tools/release/check.py                        all of it (`make release-check`)
python tools/release/check.py --extras core cli      some installations only
python tools/release/check.py --python python3.12    with another interpreter
python tools/release/check.py --torch 2.6.0          with another torch than that of constraints.txt
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from smoke import TESTS  # noqa: E402 (a sibling, found by the line above)

DIST = ROOT / "dist"
ROOMS = ROOT / "build" / "release"
DEVELOPERS = {"test", "dev", "docs", "release"}
"""Extras of this repository's developers, which `make setup` installs."""


def run(*command: object, cwd: Path = ROOT) -> None:
    """Run a command; what it printed is shown only if it fails, which ends everything."""
    print("$", *command, flush=True)
    done = subprocess.run(
        [str(each) for each in command], cwd=cwd, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-6000:]}\nfailed, exit code {done.returncode}")


def environment(name: str, interpreter: str | None) -> Path:
    """Return the Python of a fresh virtual environment."""
    folder = ROOMS / name
    shutil.rmtree(folder, ignore_errors=True)
    if interpreter is None:
        venv.create(folder, with_pip=True)
    else:
        run(interpreter, "-m", "venv", folder)
    inside = folder / ("Scripts" if sys.platform == "win32" else "bin")
    return inside / "python"


def build() -> Path:
    """Build the source distribution, and from it the wheel; check both, and return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    python = environment("tools", None)
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *constraints, "build", "twine")
    run(python, "-m", "build", "--outdir", DIST, ROOT)
    run(python, "-m", "twine", "check", "--strict", *DIST.iterdir())
    shutil.rmtree(ROOMS / "tools")
    (source,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    problems = check_wheel(wheel) + check_source(source)
    if problems:
        sys.exit("\n".join(problems))
    return wheel


def check_wheel(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel: its version, its files, its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (place,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = Parser().parsestr(archive.read(place).decode("utf-8"))
    problems = []
    text = (ROOT / "clipless" / "_version.py").read_text("utf-8")
    (version,) = re.findall(r'__version__ = "(.+)"', text)
    if about["Version"] != version:
        problems.append(f"the wheel says version {about['Version']}, the package {version}")
    wanted = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "clipless").rglob("*")
        if path.suffix in (".py", ".toml", ".j2", ".json") or path.name == "py.typed"
    ]
    problems += [f"the wheel lacks {name}" for name in sorted(set(wanted) - names)]
    strange = [n for n in names if not n.startswith(("clipless/", f"{place.split('/')[0]}/"))]
    problems += [f"the wheel holds {name}" for name in sorted(strange)]
    for field in ("Summary", "License-Expression", "Requires-Python", "Description-Content-Type"):
        if not about[field]:
            problems.append(f"the metadata have no {field}")
    if not any(name.endswith("LICENSE") for name in names):
        problems.append("the wheel has no licence")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    missing = set(declared["optional-dependencies"]) - set(about.get_all("Provides-Extra") or ())
    problems += [f"the metadata lack the extra {name}" for name in sorted(missing)]
    untried = missing | (set(declared["optional-dependencies"]) - DEVELOPERS - set(TESTS))
    problems += [f"tools/release/smoke.py does not try the extra {n}" for n in sorted(untried)]
    return problems


def check_source(source: Path) -> list[str]:
    """Return what a source distribution lacks, or holds without need."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    problems = [
        f"the source distribution lacks {name}"
        for name in ("pyproject.toml", "README.md", "LICENSE", "clipless/__init__.py")
        if name not in names
    ]
    if any(name.startswith(("build/", "data/", ".venv/")) for name in names):
        problems.append("the source distribution holds what was built or downloaded")
    return problems


def try_extra(wheel: Path, extra: str, arguments: argparse.Namespace) -> None:
    """Install the wheel with one extra into a fresh environment, and use it there."""
    python = environment(extra, arguments.python)
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    if arguments.torch:
        constraints = re.sub(r"(?m)^torch==.*$", f"torch=={arguments.torch}", constraints)
    (ROOMS / "constraints.txt").write_text(constraints, "utf-8")
    wanted = wheel if extra == "core" else f"{wheel}[{extra}]"
    limits = ("--constraint", ROOMS / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *limits, wanted)
    run(python, "-m", "pip", "check")
    folder = ROOMS / f"{extra}-work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(python, HERE / "smoke.py", extra, cwd=folder)
    if extra == "all":
        run(python, HERE / "sbom.py", "clipless", "all", DIST / "sbom.json", cwd=folder)
    shutil.rmtree(ROOMS / extra)


def main() -> None:
    """Build, check, install and try."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", nargs="+", default=list(TESTS), choices=list(TESTS))
    parser.add_argument("--python", help="the interpreter of the fresh environments")
    parser.add_argument("--torch", help="another version of torch than that of constraints.txt")
    arguments = parser.parse_args()
    wheel = build()
    for extra in arguments.extras:
        try_extra(wheel, extra, arguments)
    print(f"{wheel.name}: built, checked, and tried with {', '.join(arguments.extras)}")


if __name__ == "__main__":
    main()
