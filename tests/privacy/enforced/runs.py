"""Private runs with enforced bounds, and what single examples contribute in them."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from clipless import PrivacyEngine, losses
from clipless.privacy import EnforcedBounds

EXAMPLES = 40


def enforced_run(model, data, *, bounds="enforced", batch_size=10, noise_multiplier=0.0, lr=0.1,
                 criterion=None, engine=None, **options):  # fmt: skip
    """An engine whose run has enforced bounds, with the optimizer and the loader."""
    engine = engine or PrivacyEngine(insecure_seed=0)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr)
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, criterion=criterion or losses.CrossEntropy(),
        data_loader=DataLoader(TensorDataset(*data), batch_size=batch_size),
        noise_multiplier=noise_multiplier, bounds=bounds, **options,
    )  # fmt: skip
    return engine, optimizer, loader


def session_of(model, draw, *, thresholds=1.0, exact=None):
    x = draw(EXAMPLES)
    bounds = EnforcedBounds(thresholds=thresholds, exact_norms=exact)
    return enforced_run(model, (x, torch.zeros(EXAMPLES).long()), bounds=bounds)[0].session


def sums(session, inputs, cotangents):
    """The sums over the batch, by parameter, as a step would release them without noise."""
    enforcement = session.enforcement
    with enforcement.stand_in():
        enforcement.begin_pass(inputs)
        output = session.run_eagerly(inputs)
        found = enforcement.gradients(output, cotangents)
    return {
        parameter.name: torch.zeros(()) if gradient is None else gradient
        for parameter, gradient in zip(session.plan.parameters, found, strict=True)
    }


def plain_gradients(model, x, cotangents):
    """Every example's own gradients, by running the model itself on one at a time."""
    names, parameters = zip(
        *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
    )
    rows = []
    for row in range(x.shape[0]):
        output = model.forward(x[row : row + 1])
        rows.append(
            torch.autograd.grad(
                output, parameters, cotangents[row : row + 1], allow_unused=True,
                materialize_grads=True,
            )
        )  # fmt: skip
    return {
        name: torch.stack(each) for name, each in zip(names, zip(*rows, strict=True), strict=True)
    }
