"""Federated rounds over the real Flower: its server, its nodes and its transport, on loopback.

Flower's pins exclude ours (it wants an older typer), so that it has an environment of its own,
which sees this one's packages behind its own. `CLIPLESS_FLOWER_ENV` names one that exists.
"""

import json
import os
import signal
import socket
import subprocess
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from clipless.ledger import read_ledger

APP = Path(__file__).parent / "flower_app"
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    """The `bin` folder of an environment with Flower."""
    given = os.environ.get("CLIPLESS_FLOWER_ENV")
    folder = Path(given) if given else tmp_path_factory.mktemp("flower") / "env"
    if not given:
        venv.create(folder, with_pip=True)
        pins = folder / "pins.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        pins.write_text("\n".join(each for each in lines if each.startswith("numpy==")))
        command = [folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", pins]
        done = subprocess.run([*command, "flwr>=1.30"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"Flower cannot be installed here: {done.stderr[-300:]}")
        packages = next((folder / "lib").glob("python*/site-packages"))
        (packages / "zz-shared.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("noise", ["shares", "central"])
def test_rounds_over_flower(flower, tmp_path, noise):
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    out.mkdir()
    port = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "loop"\n[superlink.loop]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n"
    )
    environment = {
        **os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        "PATH": f"{flower}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    started = []

    def start(name, *arguments):
        log = (tmp_path / f"{name}.log").open("w")
        started.append(
            subprocess.Popen(
                [flower / name.split("-of-")[0], "--insecure", *arguments], env=environment,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )
        )  # fmt: skip

    try:
        start("flower-superlink", "--disable-runtime-dependency-installation", "--port", str(port))
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
            time.sleep(0.5)
        for number in range(3):
            start(
                f"flower-supernode-of-{number}", "--superlink", f"127.0.0.1:{port}",
                "--port", str(free_port()), "--node-config", f"partition-id={number}",
            )  # fmt: skip
        subprocess.run(
            [
                flower / "flwr", "run", str(APP), "loop",
                "--run-config", f'folder="{out}" noise="{noise}"',
            ],
            env=environment, check=True, timeout=120, cwd=tmp_path,
        )  # fmt: skip
        until = time.monotonic() + 400
        while not (out / "result.json").exists() and time.monotonic() < until:
            time.sleep(1)
        logs = {each.name: each.read_text()[-2000:] for each in tmp_path.glob("*.log")}
        assert (out / "result.json").exists(), logs
        time.sleep(1)
    finally:
        for each in reversed(started):
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGTERM)
        for each in started:
            try:
                each.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(each.pid, signal.SIGKILL)
    result = json.loads((out / "result.json").read_text())
    # The third client fails in the second round: one dropout, which the shares allow for.
    assert result["summed"] == [3, 2]
    assert result["cost"]["rounds"] == 2
    assert (result["cost"]["message_epsilon"] is None) == (noise == "central")
    counts = [
        sum(read_ledger(out / f"{name}.jsonl").counts().values())
        for name in ("server", "client-0", "client-1", "client-2")
    ]
    assert counts == [2, 2, 2, 1]
    goal = [1.0, -2.0, 0.5, 0.0, 1.0]
    assert sum((a - b) ** 2 for a, b in zip(result["weight"], goal, strict=True)) < 2.5
