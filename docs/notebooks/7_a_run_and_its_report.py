# %% [markdown]
# # A run and its report
# A run is a folder: configuration, ledger, metrics, weights, and two pages. This is what `clipless train` does.

# %%
from clipless.runs import RunConfig, open_run, train_run

config = RunConfig.from_dict(
    {
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": 32},
        "loss": {"name": "cross_entropy", "tau": 10.0},
        "privacy": {"epsilon": 3.0},
        "training": {"epochs": 20, "batch_size": 300, "product_clip": 0.3},
    }
)
result = train_run(config, "run", report=True)
print(result.epsilon, result.metrics)

# %%
from pathlib import Path

for path in sorted(Path("run").iterdir()):
    print(f"{path.name}{'/' if path.is_dir() else ''}")

# %% [markdown]
# Opening a run checks it: weights, constraints, bounds and data are compared with what was written down.

# %%
run = open_run("run")
print(run.epsilon(), type(run.model).__name__)

# %% [markdown]
# The report as data. `report.html` is the page for people; it may be published.

# %%
from clipless.report import build

report = build("run")
print(report.claim.headline)
report.sound

# %%
import json
from clipless.plots import training_figure

lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
training_figure(
    [line for line in lines if line.get("kind") == "epoch"], title="a run on the digits"
)
