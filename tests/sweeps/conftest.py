"""Databases for workers to share: a file, and a PostgreSQL server where one is installed."""

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

import optuna
import pytest

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin")) if os.name == "posix" else []


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(scope="session")
def server():
    """The URL of a PostgreSQL server that listens on a socket in a folder of its own."""
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed")
    found = shutil.which("initdb")
    programs = Path(found).parent if found else (PROGRAMS[-1] if PROGRAMS else None)
    if programs is None or not (programs / "initdb").exists():
        pytest.skip("no PostgreSQL server is installed")
    root = os.geteuid() == 0  # which the server refuses to run as
    if root and not any(user.pw_name == "postgres" for user in pwd.getpwall()):
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    place = Path(tempfile.mkdtemp(prefix="clipless-postgresql-"))
    if root:
        shutil.chown(place, "postgres", "postgres")

    def run(program, *arguments):
        command = [str(programs / program), *map(str, arguments)]
        if root:
            command = ["su", "postgres", "-s", "/bin/sh", "-c", " ".join(map(repr, command))]
        subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=place)

    data = place / "data"
    try:
        run("initdb", "-D", data, "-A", "trust", "-U", "postgres", "--no-sync")
        options = f"-c listen_addresses= -c unix_socket_directories={place} -c fsync=off"
        run("pg_ctl", "-D", data, "-l", place / "log", "-w", "-o", options, "start")
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={place}"
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request, tmp_path):
    """What a worker is told: `-` for the file in the folder of the sweep, or a URL."""
    if request.param == "sqlite":
        yield "-"
        return
    import psycopg

    url = request.getfixturevalue("server")
    name = f"sweep_{uuid.uuid4().hex[:8]}"
    place = url.partition("host=")[2]
    with psycopg.connect(host=place, user="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield url.replace("/postgres?", f"/{name}?")
