"""Processes that are not in step with each other take no step at all."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from clipless import PrivacyEngine, losses
from clipless import nn as lip
from clipless.errors import LedgerError, PrivacyError
from clipless.privacy import PoissonSampling, PrivateLoader
from tests.distributed.group import outcomes, together
from tests.distributed.runs import final_weights, private_run
from tests.privacy.runs import Run, examples, mlp


def different_sizes():
    private_run(mlp, data=examples(100 - dist.get_rank()))


def different_models():
    private_run(mlp, model=torch.nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(6, 3 + dist.get_rank())))  # fmt: skip


def different_noise():
    private_run(mlp, noise_multiplier=1.0 + dist.get_rank())


def different_learning_rates():
    model = mlp()
    Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank())))


def different_bounds():
    model = mlp()
    model[0].norm = 1.0 + dist.get_rank()
    private_run(mlp, model=model)


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (different_sizes, "examples: 100 in process 0, 99 in process 1"),
        (different_models, "parameters"),
        (different_noise, "noise_multiplier: 1.0 in process 0, 2.0 in process 1"),
        (different_learning_rates, "optimizer options"),
        (different_bounds, "parameters"),
    ],
)
def test_different_runs_are_refused(work, what):
    for kind, text in outcomes(work, 2):
        assert kind == "PrivacyError"
        assert what in text


def initial_weights_differ():
    run = private_run(mlp, seed=dist.get_rank())
    return final_weights(run)


def test_all_begin_with_the_weights_of_process_0():
    first, second = together(initial_weights_differ, 2)
    torch.manual_seed(0)
    for a, b, c in zip(first, second, mlp().parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def out_of_step(fault):
    """Two good steps, then one process does something that the other does not."""
    run = private_run(mlp).steps(2)
    before = final_weights(run)
    with torch.no_grad():
        if dist.get_rank() == 1:
            fault(run)
    taken = 2
    try:
        for _ in range(20):
            run.step()
            taken += 1
            before = final_weights(run)
    except PrivacyError as error:
        same = all(map(torch.equal, before, final_weights(run)))
        return str(error), taken, same, run.engine.ledger.releases
    return "", taken, True, run.engine.ledger.releases


def skip_a_batch(run):
    run.batch()


def other_noise(run):
    session = run.engine.session
    session.plan = replace(session.plan, noise_multiplier=2.0)


@pytest.mark.parametrize("fault", [skip_a_batch, other_noise])
@pytest.mark.filterwarnings("ignore:1 drawn batch")
def test_processes_out_of_step_take_no_step(fault):
    for text, taken, same, _ in together(out_of_step, 2, fault):
        assert "no longer in step" in text
        assert taken == 2
        assert same, "a step that is refused changes no weight"


def frozen_weight_edited():
    """Frozen weights are not sent around: only the comparison can notice that they differ."""
    model = mlp()
    model[1].weight.requires_grad_(False)
    run = Run(model=model, lr=0.1)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[1].weight.mul_(0.5)
    for step in range(40):
        try:
            run.step()
        except PrivacyError as error:
            return step, str(error)
    return None, ""


def test_different_weights_are_noticed():
    for step, text in together(frozen_weight_edited, 2):
        assert step <= 16
        assert "different weights" in text


def ledger_fails(folder):
    """Process 0 cannot write its third step; what do the others do?"""
    run = private_run(
        mlp, engine=PrivacyEngine(ledger=folder / "ledger.jsonl", insecure_seed=0)
    ).steps(2)
    before = final_weights(run)
    if dist.get_rank() == 0:

        def refuse(*arguments, **options):
            raise LedgerError("cannot write the ledger: the disk is full")

        run.engine.ledger.spend = refuse
    with pytest.raises(PrivacyError) as error:
        run.step()
    return str(error.value), all(map(torch.equal, before, final_weights(run)))


def test_nobody_steps_if_the_ledger_cannot_be_written(tmp_path):
    (own, same), (others, also_same) = together(ledger_fails, 2, tmp_path)
    assert "disk is full" in own
    assert "process 0 has refused this step" in others
    assert same
    assert also_same


def foreign_wrapper():
    model = mlp()
    run = private_run(mlp, model=model)
    with pytest.raises(PrivacyError, match="was not given to make_private"):
        DistributedDataParallel(model)(run.batch()[0])
    other = private_run(mlp, "ddp")
    other.model.require_backward_grad_sync = True
    with pytest.raises(PrivacyError, match="told to average gradients again"):
        other.step()
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        module = DistributedDataParallel(mlp(), **options)
        with pytest.raises(PrivacyError, match=next(iter(options))):
            Run(model=module, optimizer=torch.optim.SGD(module.module.parameters(), lr=0.1))
    hooked = DistributedDataParallel(mlp())
    hooked.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(PrivacyError, match="communication hook"):
        Run(model=hooked, optimizer=torch.optim.SGD(hooked.module.parameters(), lr=0.1))


def sharded_otherwise():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(
        mlp(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    with pytest.raises(PrivacyError, match="mixed precision policy"):
        private_run(mlp, model=model)
    model = mlp()
    fully_shard(model[1], mesh=mesh)
    with pytest.raises(PrivacyError, match="not sharded while others are"):
        private_run(mlp, model=model)
    run = private_run(mlp, "fsdp")
    run.inner.set_gradient_divide_factor(2.0)
    with pytest.raises(PrivacyError, match="told to divide its gradients"):
        run.step()
    run = private_run(mlp, "fsdp")
    with pytest.raises(PrivacyError, match="cannot be compiled"):
        run.engine.compile()
    # As before torch 2.9 and, the first of them under another name, before 2.8.
    for name in ("set_force_sum_reduction_for_comms", "set_gradient_divide_factor"):
        delattr(FSDPModule, name)
        with pytest.raises(PrivacyError, match=r"torch 2\.9 or newer"):
            private_run(mlp, "fsdp")


class UsedDirectly(torch.nn.Sequential):
    """Uses a weight without calling its layer, once that is switched on."""

    on = False

    def forward(self, x):
        out = super().forward(x)
        return (
            out + torch.nn.functional.linear(x, self[1].weight)[:, :3] if UsedDirectly.on else out
        )


def weights_used_directly():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run = private_run(
        mlp, model=fully_shard(UsedDirectly(*mlp()), mesh=init_device_mesh("cpu", (2,)))
    )
    run.step()
    UsedDirectly.on = True
    with pytest.raises(PrivacyError, match="in another way than by calling its layer"):
        run.step()


def loaders_and_optimizers():
    data = examples(100)
    sampling = PoissonSampling(dataset_size=100, rate=0.2)
    lonely = PrivateLoader(data, sampling=sampling, rank=0, world_size=1)
    noticing = PrivateLoader(data, sampling=sampling)
    assert noticing.place == (dist.get_rank(), 2)
    with pytest.raises(PrivacyError, match="sample of its own"):
        next(iter(noticing))
    for loader, fits in ((lonely, False), (noticing, True)):
        model = mlp()
        arguments = {
            "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "data_loader": loader, "criterion": losses.CrossEntropy(), "noise_multiplier": 1.0,
        }  # fmt: skip
        if fits:
            PrivacyEngine().make_private(**arguments)
        else:
            with pytest.raises(PrivacyError, match=r"part 0 of 1"):
                PrivacyEngine().make_private(**arguments)
    run = private_run(mlp).steps(2)
    with pytest.raises(PrivacyError, match="gather_optimizer_state"):
        run.optimizer.state_dict()
    run.engine.gather_optimizer_state()
    if dist.get_rank() == 0:
        state = run.optimizer.state_dict()["state"]
        assert all(state[index]["momentum_buffer"] is not None for index in range(3))
    run.step()
    with pytest.raises(PrivacyError, match="gather_optimizer_state"):
        run.optimizer.state_dict()


@pytest.mark.parametrize(
    "work", [foreign_wrapper, sharded_otherwise, weights_used_directly, loaders_and_optimizers]
)
def test_what_would_average_or_mix_is_refused(work):
    together(work, 2)


def dies():
    run = private_run(mlp).steps(2)
    if dist.get_rank() == 1:
        os._exit(9)
    with pytest.raises(PrivacyError, match="another process has ended") as error:
        run.steps(2)
    return str(error.value)


def test_a_process_that_dies_stops_the_others():
    (kind, _), (other, _) = outcomes(dies, 2)
    assert (kind, other) == ("done", "killed")


def straggles():
    import time

    run = private_run(mlp).steps(1)
    if dist.get_rank() == 1:
        time.sleep(4)
        os._exit(0)
    with pytest.raises(PrivacyError, match="does not answer"):
        run.steps(2)


def test_a_straggler_is_waited_for_until_the_timeout():
    assert outcomes(straggles, 2, timeout=2)[0][0] == "done"
