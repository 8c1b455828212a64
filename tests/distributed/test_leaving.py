"""Leaving a process group: nothing of ours holds it, so that its threads can end with it."""

import weakref

import torch.distributed as dist

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
