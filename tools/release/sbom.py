"""The list of all packages that a distribution brings, with versions and licences (CycloneDX JSON).

Reads what is installed in the environment that runs it; needs nothing but Python and pip.

python tools/release/sbom.py clipless all sbom.json
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name


def closure(name: str, extras: tuple[str, ...] = ()) -> dict[str, metadata.Distribution]:
    """Return all installed packages that `name[extras]` needs, itself included, by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(name, extras)]
    seen = set()
    while waiting:
        each, wanted = waiting.pop()
        key = (canonicalize_name(each), frozenset(wanted))
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = metadata.distribution(each)
        except metadata.PackageNotFoundError:
            continue  # for another platform, or an extra that is not installed
        found[canonicalize_name(each)] = distribution
        for line in distribution.requires or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *wanted)):
                waiting.append((requirement.name, tuple(requirement.extras)))
    return dict(sorted(found.items()))


def licence(distribution: metadata.Distribution) -> str:
    """Return a package's licence: its expression, else its classifiers, else its own words."""
    about = distribution.metadata
    if about.get("License-Expression"):
        return str(about["License-Expression"])
    named = [
        line.rpartition("::")[2].strip()
        for line in about.get_all("Classifier") or ()
        if line.startswith("License ::") and not line.endswith("OSI Approved")
    ]
    if named:
        return " AND ".join(named)
    words = str(about.get("License") or "").strip()
    return re.split(r"\n", words)[0][:80] or "unknown"


def document(packages: dict[str, metadata.Distribution], root: str) -> dict[str, Any]:
    """Return the list as a CycloneDX 1.5 document."""
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{package.version}",
            "name": package.metadata["Name"],
            "version": package.version,
            "purl": f"pkg:pypi/{name}@{package.version}",
            "licenses": [{"license": {"name": licence(package)}}],
        }
        for name, package in packages.items()
    ]
    (own,) = [each for each in components if each["purl"].startswith(f"pkg:pypi/{root}@")]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": own,
        },
        "components": [each for each in components if each is not own],
    }


def main() -> None:
    """Write the document, and say which licences there are."""
    root, extra, target = sys.argv[1:4]
    packages = closure(root, (extra,))
    Path(target).write_text(json.dumps(document(packages, root), indent=2) + "\n", "utf-8")
    for name, package in packages.items():
        print(f"{name:28} {package.version:16} {licence(package)}")
    unknown = [name for name, package in packages.items() if licence(package) == "unknown"]
    if unknown:
        sys.exit(f"no licence is stated by {', '.join(unknown)}")


if __name__ == "__main__":
    main()
