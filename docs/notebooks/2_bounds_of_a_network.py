# %% [markdown]
# # How large can a gradient be?
# Backpropagation for bounds: from the architecture alone, without looking at a single example.

# %%
import torch
import clipless
from clipless import losses, nn as lip

model = torch.nn.Sequential(
    lip.BoundedInput(norm=7.0),
    lip.SpectralConv2d(1, 8, 5, stride=2, padding="same"),
    lip.GroupSort(2),
    lip.ScaledL2NormPool2d(2),
    torch.nn.Flatten(),
    lip.SpectralLinear(8 * 7 * 7, 32),
    lip.GroupSort(2),
    lip.SpectralLinear(32, 10),
)
criterion = losses.CrossEntropy(tau=10.0)
report = clipless.sensitivity(model, loss=criterion, input_shape=(1, 28, 28))
print(report)

# %% [markdown]
# Every number is an upper bound for every image, every label and all weights inside their constraint sets. Is it a
# good one? Let us look for the largest gradient that we can find, by gradient ascent over images, labels and
# weights.

# %%
from clipless.audit import attack_bounds, class_labels

found = attack_bounds(
    model, loss=criterion, input_shape=(1, 28, 28), targets=class_labels(10), steps=20, restarts=1
)
for name, ratio in found.ratios.items():
    print(f"{name:10} found over bound {ratio:.2f}")

# %% [markdown]
# Ordinary examples are far from the bound, which is why clipping products helps:

# %%
images, labels = torch.rand(64, 1, 28, 28), torch.randint(10, (64,))
typical = {}
for name, parameter in model.named_parameters():
    norms = []
    for image, label in zip(images[:16], labels[:16], strict=True):
        loss = criterion(model(image[None]), label[None])
        norms.append(torch.autograd.grad(loss, parameter)[0].norm().item())
    typical[name] = sum(norms) / len(norms)
for name, bound in report.gradient_bounds.items():
    print(f"{name:10} bound {bound:7.3f}   mean of random images {typical[name]:7.3f}")

# %%
report.plot_bounds()
