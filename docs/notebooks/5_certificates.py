# %% [markdown]
# # What a Lipschitz network proves of itself
# A private classifier of two-dimensional points, and discs within which its decision cannot change.

# %%
import torch
from sklearn.datasets import make_moons
from clipless import losses, nn as lip
from clipless.privacy import ProvedBounds
from clipless.training import Trainer

torch.manual_seed(0)
points, labels = make_moons(4000, noise=0.12, random_state=0)
x, y = torch.from_numpy(points).float(), torch.from_numpy(labels)

model = torch.nn.Sequential(
    lip.BoundedInput(2.5),
    lip.SpectralLinear(2, 64, bias=True),
    lip.GroupSort(2),
    lip.SpectralLinear(64, 32, bias=True),
    lip.GroupSort(2),
    lip.SpectralLinear(32, 2),
)
trainer = Trainer(
    model,
    losses.CrossEntropy(tau=20.0),
    target_epsilon=3.0,
    batch_size=500,
    steps=200,
    bounds=ProvedBounds(product_clip=0.5),
)
result = trainer.fit((x[:3500], y[:3500]))
print(result.epsilon, trainer.evaluate((x[3500:], y[3500:])))

# %% [markdown]
# The certified radius of each test point, and certified accuracy: right, and proved to stay right.

# %%
from clipless.robustness import certified_accuracy, certified_radius

radius = certified_radius(model, x[3500:])
certified = certified_accuracy(model, x[3500:], y[3500:], radii=(0.0, 0.05, 0.1, 0.2, 0.4))
print(certified)

# %%
certified.plot()

# %% [markdown]
# The decision regions, and the discs of forty test points. No disc crosses the boundary: that is the proof, drawn.

# %%
from clipless.plots import COLOURS, new_figure

figure, (axes,) = new_figure(width=6.4, height=4.4)
grid = torch.cartesian_prod(torch.linspace(-1.6, 2.6, 160), torch.linspace(-1.1, 1.6, 120))
with torch.no_grad():
    decided = model(grid).argmax(1).reshape(160, 120).T
axes.contour(
    torch.linspace(-1.6, 2.6, 160),
    torch.linspace(-1.1, 1.6, 120),
    decided,
    levels=[0.5],
    colors=COLOURS[2],
)
turn = torch.linspace(0, 6.2832, 60)
for point, label, r in zip(x[3500:3540], y[3500:3540], radius[:40], strict=True):
    colour = COLOURS[int(label)]
    axes.plot(*point, marker="o", markersize=3, color=colour)
    axes.fill(point[0] + r * turn.cos(), point[1] + r * turn.sin(), color=colour, alpha=0.15)
axes.set(aspect="equal", title="discs that cannot cross the boundary")
figure
