"""What is sent in a step: as much as by ordinary data parallelism, and one small message.

Counted in the usual model of collectives: of n bytes among W processes, a reduction to one process
and a broadcast from one send (W - 1) n each, an all-reduce is one after the other.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.group import together
from tests.distributed.runs import private_run
from tests.privacy.runs import cnn, examples

SHAPE = (1, 4, 4)
MESSAGE = 4 * 8
DIGEST = 8  # of what all processes release together


def ordinary_bytes():
    """One step of plain DistributedDataParallel."""
    model = DistributedDataParallel(cnn())
    sent = []

    def count(state, bucket):
        sent.append(2 * (dist.get_world_size() - 1) * bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    model.register_comm_hook(None, count)
    x, y = examples(8, SHAPE)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    return sum(sent)


def private_bytes(wrapper):
    """Steps 2 to 4 of a private run, each."""
    run = private_run(cnn, wrapper)
    run.step()
    sent, calls = [], []
    others = dist.get_world_size() - 1
    factors = {"reduce": others, "broadcast": others, "all_reduce": 2 * others}

    def counting(name, factor):
        original = getattr(dist, name)

        def call(tensor, *args, **kwargs):
            sent.append(factor * tensor.nbytes)
            calls.append(name)
            return original(tensor, *args, **kwargs)

        return call

    refused = ("all_gather", "all_gather_object", "broadcast_object_list", "all_to_all_single",
               "reduce_scatter_tensor", "all_gather_into_tensor", "gather", "scatter",
               "barrier")  # fmt: skip
    for name, factor in factors.items():
        setattr(dist, name, counting(name, factor))
    for name in refused:
        setattr(dist, name, None)  # nothing else is used
    run.steps(3)
    return sum(sent) / 3, calls.count("all_reduce") / 3


def both(wrapper):
    return ordinary_bytes(), *private_bytes(wrapper)


def test_a_step_sends_sums_in_double_precision_weights_and_two_small_messages():
    for size, wrapper in ((2, "bare"), (2, "ddp"), (4, "ddp")):
        for ordinary, private, messages in together(both, size, wrapper):
            assert ordinary == 2 * (size - 1) * 4 * sum(p.numel() for p in cnn().parameters())
            sums_in_float64, weights = ordinary, ordinary / 2
            assert private == sums_in_float64 + weights + 2 * (size - 1) * (MESSAGE + DIGEST)
            assert messages == 2


def shares(wrapper):
    """The weights that this process projects, and those whose optimizer state it has."""
    run = private_run(cnn, wrapper).steps(1)
    names = {id(p): name for name, p in run.inner.named_parameters()}
    projected = [names[id(p)] for p in run.engine.session._guard.projection.parameters]
    stepped = [names[id(p)] for p in run.optimizer.state]
    return projected, stepped


def test_work_is_shared_out():
    everything = sorted(name for name, _ in cnn().named_parameters())
    for wrapper in ("bare", "ddp", "fsdp"):
        results = together(shares, 2, wrapper)
        assert sorted(name for projected, _ in results for name in projected) == everything
        assert all(projected for projected, _ in results)
        if wrapper != "fsdp":  # of which every process has a part of every state
            assert sorted(name for _, stepped in results for name in stepped) == everything
