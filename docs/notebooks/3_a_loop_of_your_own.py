# %% [markdown]
# # A loop of your own
# An ordinary PyTorch loop on scikit-learn's digits, made private by one call.

# %%
import torch
from sklearn.datasets import load_digits
from clipless import PrivacyEngine, losses, nn as lip
from clipless.training import LayerAdam

torch.manual_seed(0)
digits = load_digits()
x = torch.from_numpy(digits.images).float().flatten(1) / 16
y = torch.from_numpy(digits.target)
train, test = (x[:1400], y[:1400]), (x[1400:], y[1400:])

model = torch.nn.Sequential(
    lip.BoundedInput(3.0),
    lip.SpectralLinear(64, 32, constraint="ball"),
    lip.GroupSort(2),
    lip.SpectralLinear(32, 10, constraint="ball"),
)
criterion = losses.CrossEntropy(tau=10.0)
optimizer = LayerAdam(model.parameters(), lr=0.02)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), batch_size=350)

# %% [markdown]
# Product clipping lowers the bounds, and so the noise. Then the one call:

# %%
import clipless

clipless.clip_products(model, fraction=0.3, loss=criterion, input_shape=(64,))
epochs = 60
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    criterion=criterion,
    target_epsilon=3.0,
    epochs=epochs,
)
print(f"noise multiplier {engine.plan.noise_multiplier:.2f}, delta {engine.plan.delta:.0e}")

# %%
sizes, accuracy = [], []
for _ in range(epochs):
    for images, labels in loader:
        sizes.append(len(images))
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy.append((model(test[0]).argmax(1) == test[1]).float().mean().item())
print(f"batches of {min(sizes)} to {max(sizes)} examples: true Poisson samples")
print(f"accuracy {accuracy[-1]:.1%} at epsilon {engine.get_epsilon():.2f}")

# %% [markdown]
# Accuracy over the epochs, on test data that are public:

# %%
from clipless.plots import new_figure

figure, (axes,) = new_figure()
axes.plot(range(1, epochs + 1), accuracy)
axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1), title="digits, epsilon 3")
figure
