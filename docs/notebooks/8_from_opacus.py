# %% [markdown]
# # Time of a step, against clipping
# The same small network and batch, three ways: plainly, with clipless, and with gradients clipped for every example
# (by `torch.func`, which is what DP-SGD needs). It is a toy on one core; [all measurements](../results/speed.md).

# %%
import time
import torch
from clipless import PrivacyEngine, losses, nn as lip

torch.set_num_threads(1)
batch = 256
x, y = torch.rand(2048, 1, 28, 28), torch.randint(10, (2048,))


def network(linear, convolution):
    return torch.nn.Sequential(
        lip.BoundedInput(7.0),
        convolution(1, 16, 5, stride=2, padding=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        linear(16 * 14 * 14, 64),
        torch.nn.ReLU(),
        linear(64, 10),
    )


def milliseconds(step, repeats=8):
    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


# %% [markdown]
# Without privacy:

# %%
plain = network(torch.nn.Linear, torch.nn.Conv2d)
sgd = torch.optim.SGD(plain.parameters(), lr=0.01)


def plain_step():
    sgd.zero_grad()
    torch.nn.functional.cross_entropy(plain(x[:batch]), y[:batch]).backward()
    sgd.step()


# %% [markdown]
# Per-example gradients, clipped and summed, with noise:

# %%
from torch.func import functional_call, grad, vmap

clipped = torch.nn.Sequential(*network(torch.nn.Linear, torch.nn.Conv2d)[1:])
parameters = dict(clipped.named_parameters())


def loss_of_one(weights, image, label):
    output = functional_call(clipped, weights, (image[None],))
    return torch.nn.functional.cross_entropy(output, label[None])


def clipped_step():
    each = vmap(grad(loss_of_one), (None, 0, 0))(parameters, x[:batch], y[:batch])
    norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
    factors = (1 / norms).clamp(max=1)
    with torch.no_grad():
        for name, parameter in parameters.items():
            total = torch.einsum("b,b...->...", factors, each[name])
            parameter -= 0.01 * (total + torch.randn_like(total)) / batch


# %% [markdown]
# clipless, sampling, guards, noise, ledger and projection included:

# %%
model = network(lip.SpectralLinear, lip.SpectralConv2d)
criterion = losses.CrossEntropy(tau=10.0)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    criterion=criterion,
    data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=batch),
    noise_multiplier=1.0,
)


def batches():
    while True:
        yield from loader


samples = batches()


def private_step():
    images, labels = next(samples)
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()


# %%
from clipless.plots import COLOURS, new_figure

measured = {
    "no privacy": milliseconds(plain_step),
    "clipless": milliseconds(private_step),
    "clipped per example": milliseconds(clipped_step),
}
figure, (axes,) = new_figure(height=2.4)
names = list(measured)[::-1]
axes.barh(names, [measured[n] for n in names], color=[COLOURS[1], COLOURS[0], COLOURS[2]])
axes.set(xlabel="milliseconds a step, batch 256, one core, at the build of this page")
figure
