"""One run folder on the disk: the only module that knows where its files are."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from clipless.common import MALFORMED_ERRORS, error_text
from clipless.folders._checkpoints import CheckpointStore
from clipless.folders._errors import RunFolderError
from clipless.folders._json import json_data
from clipless.folders._layout import FORMAT, VERSION, CheckpointFile, RunFile
from clipless.folders._step_log import StepLog
from clipless.folders._writing import replace_file

if TYPE_CHECKING:
    from clipless.ledger import LedgerText
    from clipless.privacy import Plan

_RUN_FORMAT, _FILE_VERSION = "clipless-run", 1


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What `plan.json` says: the plan, what it was made for, and the versions that wrote it."""

    plan: Plan
    belongs_to: Mapping[str, Any]
    written_by: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """How far the newest checkpoint is, and the ledger it was saved with; no secrets."""

    step: int
    ledger_lines: tuple[str, ...]


class RunFolder:
    """The folder of one run: where its files are, reading and writing them.

    JSON files are replaced in one operation, and carry a format and a version. The layout has a
    version of its own in `format.json`; a folder without one is of version 1, and is read.

    Example:
        >>> import tempfile
        >>> folder = RunFolder(Path(tempfile.mkdtemp()) / "run")
        >>> folder.create()
        >>> _ = folder.write_json(RunFile.RESULT, {"epsilon": 3.0})
        >>> folder.version, folder.has(RunFile.PLAN), folder.read_json(RunFile.RESULT)
        (2, False, {'epsilon': 3.0})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Return a folder that is there; refuse one of a newer layout."""
        folder = cls(path)
        if not folder.path.is_dir():
            raise RunFolderError(f"there is no folder {folder.path}")
        folder.require_known_version()
        return folder

    def create(self) -> None:
        """Make the folder, and write the version of the layout unless a run is there already."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.require_known_version()
        if not any(map(self.has, (RunFile.FORMAT, RunFile.CONFIG, RunFile.PLAN))):
            content = {"format": FORMAT, "version": VERSION}
            replace_file(self.file(RunFile.FORMAT), (json.dumps(content) + "\n").encode())

    def discard(self) -> None:
        """Remove what was written for a run that has never begun; what else is there stays."""
        for name in (
            RunFile.CONFIG, RunFile.DATA, RunFile.ENVIRONMENT, RunFile.DATA_KEY, RunFile.LEDGER,
            RunFile.FORMAT, RunFile.STATISTICS,
        ):  # fmt: skip
            self.file(name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.file(RunFile.SECRETS).rmdir()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @property
    def version(self) -> int:
        """The version of the layout."""
        path = self.file(RunFile.FORMAT)
        try:
            found = json.loads(path.read_bytes())
            if found["format"] != FORMAT or not isinstance(found["version"], int):
                raise ValueError(f"it must say {FORMAT} and a whole number as its version")
        except FileNotFoundError:
            return 1
        except (OSError, *MALFORMED_ERRORS) as error:
            raise RunFolderError(
                f"{path} was damaged: {error_text(error)}. It holds the version of the folder's "
                "layout: restore it from a backup."
            ) from error
        return int(found["version"])

    def require_known_version(self) -> None:
        """Refuse a layout that a newer clipless has written."""
        if not 1 <= self.version <= VERSION:
            raise RunFolderError(
                f"{self.path} has version {self.version} of the layout of run folders, and this "
                f"clipless reads versions 1 to {VERSION}. Install a newer one: pip install "
                "--upgrade clipless. Nothing was changed."
            )

    # --- where files are -------------------------------------------------------------------------

    def file(self, name: RunFile) -> Path:
        """Return where a file of the layout is, or would be."""
        return self.path / name.value

    def has(self, name: RunFile) -> bool:
        """Return whether a file of the layout is there."""
        return self.file(name).exists()

    @property
    def ledger(self) -> Path:
        """Where the ledger is, or would be."""
        return self.file(RunFile.LEDGER)

    def checkpoints(self, *, keep: int = 2) -> CheckpointStore:
        """Return the checkpoints of the run."""
        return CheckpointStore(self.file(RunFile.CHECKPOINTS), keep=keep)

    def log(self, name: RunFile) -> StepLog:
        """Return a file of JSON lines, to be continued."""
        return StepLog(self.file(name), kind=Path(name.value).stem)

    # --- JSON files ------------------------------------------------------------------------------

    def write_json(self, name: RunFile, fields: Mapping[str, Any]) -> Path:
        """Write a JSON file, in one operation, and return where it is."""
        head = {"format": f"clipless-{Path(name.value).stem}", "version": _FILE_VERSION}
        return self._replace(name, {**head, **json_data(fields)})

    def read_json(self, name: RunFile) -> dict[str, Any]:
        """Return the fields of a JSON file, or refuse one that is damaged or missing."""
        head = (f"clipless-{Path(name.value).stem}", _FILE_VERSION)
        try:
            data = json.loads(self.file(name).read_bytes())
            if (data.pop("format"), data.pop("version")) != head:
                raise ValueError("it has another format or version than this clipless reads")
        except FileNotFoundError as error:
            raise RunFolderError(
                f"{self.path} has no {name.value}: it is not a run folder, or not whole"
            ) from error
        except (OSError, *MALFORMED_ERRORS) as error:
            raise RunFolderError(f"{self.file(name)} was damaged: {error_text(error)}") from error
        return dict(data)

    def write_plan(
        self, plan: Mapping[str, Any], *, belongs_to: Mapping[str, Any], **versions: str
    ) -> None:
        """Write the plan, what it was made for, and the versions of what else takes part."""
        from clipless import __version__

        head = {"format": _RUN_FORMAT, "version": _FILE_VERSION, "plan": plan}
        written_by = {"clipless": __version__, **versions}
        self._replace(RunFile.PLAN, {**head, "belongs_to": belongs_to, "written_by": written_by})

    def read_plan(self) -> RunDescription:
        """Return what `plan.json` says."""
        from clipless.privacy import Plan

        path = self.file(RunFile.PLAN)
        try:
            data = json.loads(path.read_bytes())
            if (data["format"], data["version"]) != (_RUN_FORMAT, _FILE_VERSION):
                raise ValueError(
                    f"format {data['format']!r} version {data['version']!r} is not known here; a "
                    "newer clipless may read it"
                )
            return RunDescription(
                plan=Plan.from_dict(data["plan"]),
                belongs_to=dict(data.get("belongs_to") or {}),
                written_by=dict(data.get("written_by") or {}),
            )
        except (OSError, *MALFORMED_ERRORS) as error:
            why = error.strerror if isinstance(error, OSError) else error_text(error)
            raise RunFolderError(
                f"{path} cannot be read: {why}. It says what the run is about, so restore it from "
                "a backup."
            ) from error

    def _replace(self, name: RunFile, content: Mapping[str, Any]) -> Path:
        replace_file(self.file(name), (json.dumps(content, indent=2) + "\n").encode())
        return self.file(name)

    # --- other files -----------------------------------------------------------------------------

    def read_ledger(self) -> LedgerText:
        """Return what has been spent, also while the run goes on."""
        from clipless.ledger import read_ledger

        return read_ledger(self.ledger)

    def has_spent(self) -> bool:
        """Return whether there is a ledger that counts any release."""
        return self.has(RunFile.LEDGER) and bool(self.read_ledger().counts())

    def write_weights(self, data: bytes) -> str:
        """Write the final weights, and return their digest."""
        replace_file(self.file(RunFile.WEIGHTS), data)
        return hashlib.sha256(data).hexdigest()

    def read_weights(self) -> bytes:
        """Return the final weights as they were written."""
        return self.file(RunFile.WEIGHTS).read_bytes()

    def weights_digest(self) -> str:
        """Return the SHA-256 of the final weights."""
        return hashlib.sha256(self.read_weights()).hexdigest()

    def write_data_key(self, key: bytes) -> None:
        """Write the key of the data's digests, which only its owner can read."""
        self.file(RunFile.SECRETS).mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(self.file(RunFile.DATA_KEY), flags, 0o600), "wb") as file:
            file.write(key)

    def read_data_key(self) -> bytes:
        """Return the key of the data's digests."""
        try:
            return self.file(RunFile.DATA_KEY).read_bytes()
        except OSError as error:
            raise RunFolderError(
                f"{self.file(RunFile.DATA_KEY)} cannot be read: {error.strerror}. Without it, "
                "nobody can tell whether data are those of the run: restore it."
            ) from error

    def newest_checkpoint(self) -> CheckpointFacts | None:
        """Return what the newest checkpoint says of the run, or None if there is none.

        Raises `OSError`, `ValueError` or `KeyError` if there is one and it cannot be read.
        """
        paths = self.checkpoints().paths()
        if not paths:
            return None
        state: dict[str, Any] = json.loads((paths[-1] / CheckpointFile.STATE).read_bytes())
        ledger = (paths[-1] / CheckpointFile.LEDGER).read_text()
        return CheckpointFacts(step=int(state["step"]), ledger_lines=tuple(ledger.splitlines()))
