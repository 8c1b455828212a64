"""Joining the processes of torchrun: which backend, which GPU. No GPU is needed for it."""

import pytest
import torch

from clipless.errors import PrivacyError
from clipless.training import _processes


@pytest.fixture
def joined(monkeypatch):
    """Join as process 3 of 4 on a machine with so many GPUs; return what was asked of torch."""

    def join(gpus, **changes):
        asked = []
        told = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
        for name, value in {**told, **changes}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: asked.append(index))
        store = torch.distributed.HashStore()
        monkeypatch.setattr(_processes, "rendezvous", lambda url: iter([(store, 3, 4)]))
        monkeypatch.setattr(_processes.atexit, "register", lambda leave: None)

        def begin(backend, *, store, rank, world_size):
            asked.append((backend, rank, world_size))
            store.set("key", "value")

        monkeypatch.setattr(torch.distributed, "init_process_group", begin)
        return _processes.join_torchrun(), asked, store

    return join


def test_gpus_talk_by_nccl_and_their_hosts_by_gloo(joined):
    device, asked, _ = joined(4)
    assert device == torch.device("cuda", 3)
    assert asked == [3, ("cpu:gloo,cuda:nccl", 3, 4)]  # the GPU is chosen before anything uses one


def test_cpus_talk_by_gloo(joined):
    device, asked, _ = joined(0)
    assert device is None
    assert asked == [("gloo", 3, 4)]


def test_more_processes_than_gpus_are_refused(joined):
    with pytest.raises(PrivacyError, match="4 processes on a machine with 2 GPUs"):
        joined(2)


def test_each_attempt_of_torchrun_has_its_own_keys(joined):
    for attempt in ("0", "1"):
        _, _, store = joined(0, TORCHELASTIC_RESTART_COUNT=attempt)
        assert store.check([f"clipless/attempt-{attempt}/key"])


@pytest.mark.parametrize("told", [{"WORLD_SIZE": "1"}, {}])
def test_one_process_is_left_alone(monkeypatch, told):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert _processes.join_torchrun() is None
    assert not torch.distributed.is_initialized()
