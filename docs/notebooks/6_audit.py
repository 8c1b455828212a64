# %% [markdown]
# # Catching a trainer that lies
# An audit attacks the finished thing. Here are two trainers that claim the same epsilon. One of them adds half of
# the noise that it should. Canaries, whose presence was decided by coins, tell them apart.

# %%
import torch
from clipless.audit import one_run_audit
from clipless.accounting import FullBatch, Mechanism, epsilon

canaries, sigma, delta = 20_000, 4.0, 1e-5
claimed = epsilon(
    [(Mechanism(noise_multiplier=sigma, sampling=FullBatch(dataset_size=canaries)), 1)], delta
)
print(f"claimed: epsilon {claimed:.2f} at delta {delta:g}")

# %% [markdown]
# The smallest possible "training": one release, in which each canary has a coordinate of its own and adds 1 to it
# if its coin says so. A score is what was released there.


# %%
def audit(noise):
    coins = torch.rand(canaries) < 0.5
    released = coins.float() + noise * torch.randn(canaries)
    return one_run_audit(released, coins, delta=delta, claimed_epsilon=claimed)


honest, lying = audit(sigma), audit(sigma / 2)
print(honest)
print(lying)

# %% [markdown]
# A lower bound above the claim exposes the liar; one below it proves nothing about the honest one. Ten runs of each:

# %%
from clipless.plots import COLOURS, EDGE, new_figure

figure, (axes,) = new_figure()
for place, noise in enumerate((sigma, sigma / 2)):
    bounds = [audit(noise).lower_bound for _ in range(10)]
    axes.plot([place + 0.03 * k for k in range(-5, 5)], bounds, "o", color=COLOURS[place])
axes.axhline(claimed, color=EDGE, linestyle="--")
axes.text(-0.3, claimed, "claimed epsilon", va="bottom")
axes.set_xticks([0, 1], ["as claimed", "half the noise"])
axes.set(ylabel="lower bound of epsilon, 95%", ylim=(0, None), xlim=(-0.4, 1.4))
figure
