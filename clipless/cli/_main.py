"""The entry point: commands by name, and errors as one paragraph with an exit code."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from clipless.cli._exits import CheckFailedError, ExitCode, exit_code_of
from clipless.cli._output import error_console, flush, note
from clipless.runs import is_first_process, torchrun_rank


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and leave the process with its exit code."""
    try:
        import typer.main
    except ImportError:
        note("Error: the command line needs the package typer: pip install 'clipless[cli]'")
        sys.exit(ExitCode.MISSING_PACKAGE)
    from clipless.cli._app import app

    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given[: given.index("--")] if "--" in given else given
    try:
        command: Any = typer.main.get_command(app)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = command.main(args=given, prog_name="clipless", standalone_mode=False)
    except CheckFailedError as failure:
        flush()
        note(str(failure))
        code = ExitCode.CHECK_FAILED
    except BaseException as error:
        flush()
        if "--debug" in own:
            traceback.print_exc()
        code = _explain(error, as_json="--json" in own)
    flush()
    sys.exit(int(code) if isinstance(code, int) else 0)


def _explain(error: BaseException, *, as_json: bool) -> int:
    """Say what went wrong, and return the exit code."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    code: int
    if "NoArgsIsHelpError" in kinds:
        print(getattr(error, "message", ""), file=sys.stderr)
        return ExitCode.USAGE
    if "ClickException" in kinds:  # typer brings its own click, or uses the real one
        code, message = ExitCode.USAGE, error.format_message()  # type: ignore[attr-defined]
        context = getattr(error, "ctx", None)
        if context is not None:
            message = message.rstrip(".")
            end = "" if message.endswith("?") else "."
            message = f"{message}{end} Try '{context.command_path} --help'."
    elif isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.UNEXPECTED
    else:
        code = exit_code_of(error)
        message = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        if code == ExitCode.UNEXPECTED:
            message = (
                f"an error that nobody foresaw, {type(error).__name__}: {message}. Add --debug to "
                "see where it happened."
            )
        elif code == ExitCode.INTERRUPTED:
            message = "interrupted"
    rank = torchrun_rank()
    if rank and code == ExitCode.INTERRUPTED:
        return code  # process 0 says so
    if as_json and not rank:
        fields = {"error": {"kind": type(error).__name__, "message": message}, "exit_code": code}
        print(json.dumps(fields, indent=2))
    output = error_console()
    where = f" in process {rank}" if rank else ""
    output.print(f"Error{where}:", style="bold red", end=" ")
    output.print(message, soft_wrap=True)
    return code


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    """One paragraph without a line of code, from one of several processes."""
    if is_first_process():
        note(f"Warning: {message}")
