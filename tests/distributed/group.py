"""Small groups of processes: forked, connected by gloo, each running one function."""

import functools
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def _member(work, rank, size, folder, arguments, timeout, port):
    torch.set_num_threads(1)
    try:
        if port is not None:
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in {**own, **place}.items()})
        elif size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size,
                timeout=timedelta(seconds=timeout),
            )  # fmt: skip
        (folder / f"{rank}.connected").touch()
        result = ("done", work(*arguments))
    except BaseException as error:
        result = (type(error).__name__, f"{error}\n{traceback.format_exc()}")
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
    os._exit(0)


@functools.cache
def _warm():
    """Import and compute what all processes need before forking: once, and not in each."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor

    from tests.privacy.runs import Run
    from tests.training.small import DATA, trainer

    torch.set_num_threads(1)
    Run(noise_multiplier=1.0).steps(1).engine.get_epsilon()
    for steps in (24, 40):  # the noise for a budget, which is looked up from then on
        trainer(steps=steps).fit(DATA)


def _free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def start(work, size, folder, *arguments, timeout=60, joined=True):
    """Begin `work(*arguments)` in `size` processes; results go to `folder`.

    `joined=False`: they are not connected, but told what torchrun would tell them.
    """
    _warm()
    port = None if joined else _free_port()
    context = multiprocessing.get_context("fork")
    members = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        for rank in range(size):
            member = context.Process(
                target=_member, args=(work, rank, size, folder, arguments, timeout, port)
            )
            member.start()
            members.append(member)
    return members


def wait_until_connected(members, folder, *, timeout=60):
    """Wait until all processes have met.

    A process that dies while gloo connects leaves the others waiting in torch for several
    timeouts, one for each process: that is before anything of ours has begun.
    """
    end = time.monotonic() + timeout
    marks = [folder / f"{rank}.connected" for rank in range(len(members))]
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < end, "the processes did not connect"
        time.sleep(0.01)


def outcomes(work, size, *arguments, timeout=60, joined=True):
    """What became of `work` in each process: its name ("done" or an error's), and what it said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        members = start(work, size, folder, *arguments, timeout=timeout, joined=joined)
        return results(members, folder, timeout=timeout)


def results(members, folder, *, timeout=60):
    """Wait for processes that were started, and return what became of them."""
    for member in members:
        member.join(2 * timeout)
    found = [folder / f"{rank}.result" for rank in range(len(members))]
    return [pickle.loads(r.read_bytes()) if r.exists() else ("killed", "") for r in found]


def together(work, size, *arguments, joined=True):
    """Return what `work` returns in each process, by rank."""
    found = outcomes(work, size, *arguments, joined=joined)
    for rank, (kind, value) in enumerate(found):
        assert kind == "done", f"process {rank}: {kind}: {value}"
    return [value for _, value in found]
