"""Leaving a process group: nothing of ours holds it, so that its threads can end with it."""

import weakref

import torch.distributed as dist

from clipless.distributed import Processes
from clipless.errors import PrivacyError
from tests.distributed.group import together
from tests.distributed.runs import private_run
from tests.privacy.runs import mlp


def train_and_leave():
    run = private_run(mlp)
    run.steps(2)
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gone = group() is None
    try:
        run.steps(1)
    except PrivacyError as error:
        return gone, str(error)
    return gone, "a step was taken"


def test_an_engine_does_not_hold_the_group():
    for gone, said in together(train_and_leave, 2):
        assert gone
        assert "process group in which training began was destroyed" in said


def talk_and_leave():
    dist.init_process_group("cuda:gloo")  # no messages between CPUs, as with NCCL
    first, second = Processes(), Processes()
    assert first._group is second._group is not dist.group.WORLD
    found = first.gather(first.rank)
    groups = weakref.ref(dist.group.WORLD), weakref.ref(first._group)
    dist.destroy_process_group()
    return found, [group() is None for group in groups]


def test_groups_of_accelerators_have_one_beside_them_which_goes_with_them():
    for found, gone in together(talk_and_leave, 2, joined=False):
        assert found == [0, 1]
        assert gone == [True, True]
