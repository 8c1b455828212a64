"""One training step of every method of the speed benchmark, as a function without arguments.

All take their batches from the same images on the same device: private training by Poisson
sampling with the size of a batch as expected size, the others by a list of indices. So a step of
either is one of as many examples, and what rows are padding is the private step's loss. All use SGD
with momentum. Networks of ours and their twins are in the channels_last format, which is faster for
all of them; Opacus and torch.func get the format that they are usually given. Compiled steps
without privacy are recorded as CUDA graphs, as those with it are.
"""

import itertools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _speed_models import IMAGE, USUAL, lipschitz, relu

from clipless import PrivacyEngine, losses
from clipless.privacy import (
    BatchOptions,
    EnforcedBounds,
    PoissonSampling,
    PrivacyOptions,
    PrivateLoader,
)

METHODS = {
    "nonprivate-relu": ("eager", "compiled", "bfloat16"),
    "nonprivate-lipschitz": ("eager", "compiled"),
    "clipless": ("eager", "compiled", "bfloat16"),
    "clipless-enforced": ("eager",),
    "opacus-hooks": ("eager",),
    "opacus-ghost": ("eager",),
    "vmap-clipping": ("eager",),
}
Step = Callable[[], object]
GRAPHS = True
"""Whether compiled steps without privacy are recorded as CUDA graphs, as those with it are."""


def applies(method: str, model: str) -> bool:
    """Whether a method can train a network: those of torch's layers have no proved bounds."""
    if model in USUAL:
        return method not in ("nonprivate-lipschitz", "clipless", "vmap-clipping")
    return method != "clipless-enforced"


class Images:
    """Random images in the memory of the device, and batches of them."""

    def __init__(self, count: int, device: torch.device, *, repeated: bool = False) -> None:
        self.count, self.device = count, device
        made = 1 if repeated else count
        self.x = torch.rand(made, *IMAGE, device=device).expand(count, *IMAGE)
        self.y = torch.randint(10, (made,), device=device).expand(count)

    def batches(self, batch: int):
        """Yield batches for ever, by indices that are drawn beforehand."""
        order = torch.randint(self.count, (8, batch), device=self.device)
        for indices in itertools.cycle(order):
            yield self.x.index_select(0, indices), self.y.index_select(0, indices)


def make_step(method: str, mode: str, model: str, batch: int, images: Images) -> Step:
    build = {
        "nonprivate-relu": lambda: plain_step(relu(model), mode, batch, images),
        "nonprivate-lipschitz": lambda: plain_step(lipschitz(model), mode, batch, images),
        "clipless": lambda: clipless_step(lipschitz(model), mode, batch, images),
        "clipless-enforced": lambda: clipless_step(relu(model), mode, batch, images, enforced=True),
        "opacus-hooks": lambda: opacus_step(relu(model), batch, images),
        "opacus-ghost": lambda: ghost_step(relu(model), batch, images),
        "vmap-clipping": lambda: vmap_step(relu(model), batch, images),
    }
    return build[method]()


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def placed(model: torch.nn.Module, images: Images) -> torch.nn.Module:
    return model.to(images.device, memory_format=torch.channels_last)


def plain_step(model, mode, batch, images):
    model = placed(model, images)
    optimizer, batches = sgd(model), images.batches(batch)
    casts = torch.autocast(images.device.type, torch.bfloat16, enabled=mode == "bfloat16")

    def loss_of(x, y):
        with casts:
            return F.cross_entropy(model(x), y)

    if mode != "eager":
        graphs = "reduce-overhead" if GRAPHS else None
        loss_of = torch.compile(loss_of, dynamic=False, mode=graphs)

    def step():
        x, y = next(batches)
        optimizer.zero_grad()
        if GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        loss_of(x, y).backward()
        optimizer.step()

    step.graphs = lambda: GRAPHS and mode != "eager"
    return step


def clipless_step(model, mode, batch, images, *, enforced=False):
    """Sampling, forward and backward pass, noise, the optimizer, projection: all of it."""
    criterion = losses.CrossEntropy(tau=10.0)
    model = placed(model, images)
    optimizer = sgd(model)
    loader = PrivateLoader(
        (images.x, images.y),
        sampling=PoissonSampling(dataset_size=images.count, rate=batch / images.count),
        batches=BatchOptions(pad=mode != "eager"),
    )
    engine = PrivacyEngine()
    precision = {"bfloat16": "bfloat16"}.get(mode, "float32" if enforced else "tf32")
    if enforced:
        allow_tf32(False)
    with warnings.catch_warnings():
        # Whatever cannot be compiled must not be timed.
        warnings.filterwarnings("error", "(?s).*compiled", UserWarning)
        engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=criterion,
            noise_multiplier=1.0,
            bounds=EnforcedBounds(thresholds=0.1, follow=True) if enforced else None,
            compile=mode != "eager",
            options=PrivacyOptions(precision=precision),
        )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step():
        if enforced:
            allow_tf32(False)
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if enforced:
            allow_tf32(True)

    step()
    assert engine.session.compiled == (mode != "eager")
    step.graphs = lambda: engine.session.uses_graphs
    if loader.padding is not None:
        # Every size is compiled and recorded before anything is timed.
        sizes = set()
        for _ in range(400):
            step()
            sizes.add(loader.current.rows)
            if len(sizes) == len(loader.padding.sizes):
                break
        step()
        step.padding = {"sizes": loader.padding.sizes, "empty": loader.padding.empty_share}
    return step


def allow_tf32(allowed):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed


def for_opacus(model):
    """The model with Opacus' own attention, which it needs in place of torch's."""
    from opacus.validators import ModuleValidator

    return ModuleValidator.fix(model)


def opacus_step(model, batch, images):
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(for_opacus(model).to(images.device))
    optimizer = DPOptimizer(
        sgd(model), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch
    )
    batches = images.batches(batch)

    def step():
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def ghost_step(model, batch, images):
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        for_opacus(model).to(images.device), max_grad_norm=1.0, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        sgd(model), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch
    )
    criterion = DPLossFastGradientClipping(model, optimizer, torch.nn.CrossEntropyLoss())
    batches = images.batches(batch)

    def step():
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def vmap_step(model, batch, images):
    """Per-example gradients by `torch.func`, clipped one by one, summed, with noise."""
    from torch.func import functional_call, grad, vmap

    model = model.to(images.device)
    optimizer, batches = sgd(model), images.batches(batch)
    names = [name for name, _ in model.named_parameters()]

    def loss_of(weights, x, y):
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    per_example = vmap(grad(loss_of), in_dims=(None, 0, 0))

    def step():
        x, y = next(batches)
        weights = dict(model.named_parameters())
        gradients = per_example({n: w.detach() for n, w in weights.items()}, x, y)
        square = sum(gradients[name].flatten(1).square().sum(1) for name in names)
        factor = (1.0 / square.sqrt().clamp(min=1e-6)).clamp(max=1.0)
        for name in names:
            total = torch.einsum("b,b...->...", factor, gradients[name])
            weights[name].grad = (total + torch.randn_like(total)) / batch
        optimizer.step()

    return step
