"""Answers of private queries, kept in a file: what goes on after a break is not asked again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipless.errors import PrivacyError
from clipless.ledger import Ledger

Answer = Tensor | dict[str, float]


class KeptAnswers:
    """The answers that a run was given, in order, in a file that may be published.

    An answer was released and paid for when it was first given. To give the same one again is a
    function of what is known: it costs nothing. One that was asked for and not kept, as the process
    ended in between, is asked anew, and paid for again. Each is kept with the digest of the line
    of the ledger that pays for it: see `require_paid`.

    `about` is what the run belongs to, as plain data of public things; a file that was kept for
    something else is refused.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "answers.jsonl"
        >>> KeptAnswers(path, {"rows": 3}).keep("sum", torch.tensor([1.5], dtype=torch.float64))
        >>> again = KeptAnswers(path, {"rows": 3})
        >>> again.take("sum"), again.take("sum")
        (tensor([1.5000], dtype=torch.float64), None)
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, Any]) -> None:
        self._path = Path(path)
        self._place = 0
        said = json.loads(json.dumps(about))
        self._lines = _read(self._path)
        if not self._lines:
            self._path.write_text(json.dumps({"about": said}) + "\n")
            self._lines = [{"about": said}]
        then = self._lines.pop(0).get("about")
        if then != said:
            known = then if isinstance(then, dict) else {}
            other = sorted(name for name in {*said, *known} if said.get(name) != known.get(name))
            raise PrivacyError(
                f"{self._path} belongs to another fit: it differs in {', '.join(other)}. Go on "
                "with what it was begun with, or choose a new folder."
            )

    def __len__(self) -> int:
        """Return how many answers are kept."""
        return len(self._lines)

    def take(self, label: str) -> Answer | None:
        """Return the next answer that was kept, None if there is no further one."""
        if self._place >= len(self._lines):
            return None
        line = self._lines[self._place]
        if line["label"] != label:
            raise PrivacyError(
                f"{self._path} holds an answer to {line['label']!r} where {label!r} is asked: it "
                "was kept for another fit, or by another version. Choose a new folder."
            )
        self._place += 1
        if "shape" not in line:
            return {str(name): float(count) for name, count in line["answer"].items()}
        return torch.tensor(line["answer"], dtype=torch.float64).reshape(line["shape"])

    def require_paid(self, ledger: Ledger) -> None:
        """Refuse to give answers again that the ledger does not count."""
        told = [line.get("digest") for line in self._lines]
        unpaid = [name for name in told if name is not None and not ledger.has_line(name)]
        # Earlier versions kept no digests: there must at least be as many releases.
        if unpaid or len(told) > ledger.releases:
            raise PrivacyError(
                f"{self._path} holds answers that {ledger.path or 'the ledger'} does not count: "
                f"{len(unpaid) or len(told) - ledger.releases} of {len(told)}. Epsilon would leave "
                "them out. Put the ledger back that this run has written, from a backup if it is "
                "gone; a new run in another folder costs its own budget, besides what these have"
            )

    def require_writable(self) -> None:
        """Fail before an answer is paid for if it could not be kept."""
        with self._path.open("a"):
            pass

    def keep(self, label: str, answer: Answer, *, release: str | None = None) -> None:
        """Write an answer down, before anybody uses it, with the ledger's line that pays for it."""
        line: dict[str, Any] = {"label": label, "answer": answer}
        if release is not None:
            line["digest"] = release
        if isinstance(answer, Tensor):
            line |= {"answer": answer.flatten().tolist(), "shape": list(answer.shape)}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._lines.append(line)
        self._place = len(self._lines)


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file up to the first that is not whole; what follows it is cut off."""
    if not path.exists():
        return []
    found, good = list[dict[str, Any]](), 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(entry, dict):
            break
        found.append(entry)
        good += len(line)
    with path.open("r+b") as file:
        file.truncate(good)
    return found
