"""Small private runs in several processes, wrapped in each of the ways that torch offers."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.privacy.runs import SHAPES, Run, examples

WRAPPERS = ("bare", "ddp", "fsdp")


def wrapped(model, wrapper):
    """The model for `wrapper`, if there are several processes."""
    if not dist.is_initialized() or wrapper == "bare":
        return model
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if sum(1 for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
            break  # the other layers belong to the root
    return fully_shard(model, mesh=mesh)


def private_run(make, wrapper="bare", *, seed=0, model=None, momentum=0.9, **options):
    torch.manual_seed(seed)
    model = make() if model is None else model
    module = wrapped(model, wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    options.setdefault("data", examples(100, SHAPES.get(make, (6,))))
    run = Run(model=module, optimizer=optimizer, **options)
    vars(run)["inner"] = model
    return run


def whole(tensor):
    found = tensor.full_tensor() if hasattr(tensor, "placements") else tensor
    return found.detach().clone()


def final_weights(run):
    return [whole(parameter) for parameter in run.inner.parameters()]


def largest_difference(first, second):
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
