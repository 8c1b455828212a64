# %% [markdown]
# # Noise, batches and steps
# What epsilon costs, before anything is trained. Only the accountant is used here: no torch, no data.

# %%
from clipless.accounting import PoissonSampling, default_delta, noise_multiplier_for

N = 60_000
delta = default_delta(N)


def sigma(batch, steps, epsilon):
    sampling = PoissonSampling(dataset_size=N, rate=batch / N)
    return noise_multiplier_for(
        target_epsilon=epsilon, target_delta=delta, steps=steps, sampling=sampling
    )


print(f"delta {delta:.0e}")
for epsilon in (0.5, 1, 3, 8):
    print(f"epsilon {epsilon:3}: noise multiplier {sigma(4096, 450, epsilon):6.2f}")

# %% [markdown]
# What an update feels is the noise over the batch size. At a fixed epsilon it falls with the batch, and then no longer:

# %%
from clipless.plots import new_figure

sizes = [256, 512, 1024, 2048, 4096, 8192, 16384]
figure, (axes,) = new_figure()
for epsilon in (1, 3, 8):
    axes.plot(
        sizes, [sigma(b, 450, epsilon) / b for b in sizes], marker="o", label=f"epsilon {epsilon}"
    )
axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="sigma / b", title="450 steps")
axes.legend(frameon=False)
figure

# %% [markdown]
# And epsilon over the steps of a run, step by step as the ledger would count it:

# %%
from clipless.accounting import Mechanism, epsilon

step = Mechanism(noise_multiplier=2.42, sampling=PoissonSampling(dataset_size=N, rate=4096 / N))
counts = [1, 50, 100, 200, 300, 450, 600, 900]
figure, (axes,) = new_figure()
for name in ("pld", "rdp"):
    axes.plot(
        counts,
        [epsilon([(step, n)], delta, accountant=name) for n in counts],
        marker="o",
        label=name,
    )
axes.set(xlabel="steps", ylabel="epsilon", ylim=(0, None), title="two accountants, one history")
axes.legend(frameon=False)
figure
