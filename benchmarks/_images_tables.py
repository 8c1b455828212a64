"""Tables and plots of the image benchmarks, with published figures beside ours."""

import json
import statistics
from collections import defaultdict

from _results import RESULTS

# (data set, epsilon) -> {whose: accuracy in percent}; delta 1e-5, no real public data.
PUBLISHED = {
    ("mnist", 3.0): {"scattering + clipped linear": 98.7, "clipped CNN": 98.1},
    ("fashion-mnist", 3.0): {"scattering + clipped linear": 89.7, "clipped CNN": 86.0},
    ("cifar10", 1.0): {"best without learned priors": 60.6, "DP-RandP": 72.3},
    ("cifar10", 3.0): {
        "scattering + clipped linear": 67.0,
        "scattering + clipped CNN": 69.3,
        "clipped CNN": 59.2,
    },
    ("cifar10", 8.0): {"clipped WRN-40-4, many views": 81.4},
    ("cifar10", 20.0): {"the Clipless paper": 47.4},
}
# The paper's certificate table at epsilon 20: temperature -> percent, AUROC and advantage.
PAPER_RADII = (0, 1, 2, 4, 8, 16)
PAPER_CERTIFICATES = {
    0.01: ((47.4, 5.9, 0.1, 0.0, 0.0, 0.0), 59.8, 23.9),
    0.22: ((44.4, 39.1, 34.2, 24.9, 11.5, 0.8), 50.1, 15.0),
    0.40: ((41.6, 38.4, 35.6, 29.6, 19.1, 5.3), 50.0, 11.3),
    0.74: ((38.4, 36.4, 34.7, 30.9, 24.1, 13.0), 51.9, 20.5),
    2.77: ((33.3, 32.2, 31.2, 29.3, 25.9, 18.8), 52.5, 21.3),
    5.40: ((32.5, 31.4, 30.4, 28.8, 25.5, 19.7), 59.7, 23.6),
}


def read(name):
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    return found["results"] if isinstance(found, dict) else found


def summary():
    """(data set, recipe) -> epsilon, mean, spread and number of accuracies in percent, seconds."""
    groups = defaultdict(list)
    for row in read("images"):
        groups[row["dataset"], row["recipe"]].append(row)
    return {
        key: {
            "epsilon": max(row["epsilon"] for row in rows),
            "mean": 100 * statistics.mean(row["accuracy"] for row in rows),
            "spread": 100 * statistics.pstdev(row["accuracy"] for row in rows),
            "seeds": len(rows),
            "seconds": statistics.mean(row["seconds"] for row in rows),
        }
        for key, rows in sorted(groups.items())
    }


def certificate_rows(epsilon):
    """Temperature -> mean over seeds of certified accuracies, AUROC and advantage, in percent."""
    groups = defaultdict(list)
    for row in read("images-certificates"):
        if abs(row["epsilon"] / epsilon - 1) < 0.01:
            groups[row["temperature"]].append(row)
    return {
        temperature: (
            tuple(
                100 * statistics.mean(row["certified"][i] for row in rows)
                for i in range(len(PAPER_RADII))
            ),
            100 * statistics.mean(row["membership_auroc"] for row in rows),
            100 * statistics.mean(row["membership_advantage"] for row in rows),
        )
        for temperature, rows in sorted(groups.items())
    }


def print_tables():
    print("| recipe | epsilon | accuracy | seeds | seconds | published |")
    print("|---|---|---|---|---|---|")
    for (dataset, recipe), row in summary().items():
        others = PUBLISHED.get((dataset, float(round(row["epsilon"]))), {})
        beside = "; ".join(f"{whose} {value}" for whose, value in others.items())
        print(
            f"| `{recipe}` | {row['epsilon']:.3f} | {row['mean']:.2f} ± {row['spread']:.2f} "
            f"| {row['seeds']} | {row['seconds']:.1f} | {beside} |"
        )
    print("\n| temperature | " + " | ".join(f"r = {r}" for r in PAPER_RADII) + " | AUROC | Adv. |")
    print("|---|" + "---|" * (len(PAPER_RADII) + 2))
    for name, table in (
        ("epsilon 20", certificate_rows(20.0)),
        ("epsilon 1", certificate_rows(1.0)),
        ("paper, epsilon 20", PAPER_CERTIFICATES),
    ):
        for temperature, (accuracies, auroc, advantage) in table.items():
            cells = " | ".join(f"{value:.1f}" for value in accuracies)
            print(f"| {name}, {temperature:g} | {cells} | {auroc:.1f} | {advantage:.1f} |")


def plot():
    """Write `images.svg`: accuracy against epsilon, and certified accuracy against the radius."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "clipless"  # the same file for the same figures
    names = ("mnist", "fashion-mnist", "cifar10")
    figure, panels = pyplot.subplots(1, 4, figsize=(16, 3.6), layout="constrained")
    for panel, name in zip(panels, names, strict=False):
        drawn = False
        for label, prior in (("scattering + linear", False), ("random prior + linear", True)):
            points = sorted(
                (row["epsilon"], row["mean"], row["spread"])
                for (dataset, recipe), row in summary().items()
                if dataset == name and ("random-prior" in recipe) == prior
            )
            if points:
                x, y, spread = zip(*points, strict=True)
                panel.errorbar(x, y, yerr=spread, marker="o", label=f"clipless, {label}")
                drawn = True
        for (dataset, epsilon), others in PUBLISHED.items():
            for whose, value in others.items() if dataset == name else ():
                panel.plot(epsilon, value, "x", color="gray")
                rightmost = epsilon == max(e for d, e in PUBLISHED if d == name)
                panel.annotate(
                    whose, (epsilon, value), xytext=(-4 if rightmost else 4, -2), fontsize=6,
                    textcoords="offset points", ha="right" if rightmost else "left",
                )  # fmt: skip
        panel.set(title=name, xlabel="epsilon at delta 1e-5", ylabel="accuracy (%)")
        if drawn:
            panel.legend(fontsize=7, loc="center right" if name == "cifar10" else "upper left")
    for label, table, style in (
        ("clipless, epsilon 20", certificate_rows(20.0), "-o"),
        ("clipless, epsilon 1", certificate_rows(1.0), "-o"),
        ("paper, epsilon 20", PAPER_CERTIFICATES, "--x"),
    ):
        if table:
            best = [max(row[0][i] for row in table.values()) for i in range(len(PAPER_RADII))]
            panels[3].plot(PAPER_RADII, best, style, label=f"{label}, best temperature")
    panels[3].set(
        title="cifar10, certified", xlabel="radius x 255", ylabel="certified accuracy (%)"
    )
    panels[3].legend(fontsize=7)
    figure.savefig(RESULTS / "images.svg", metadata={"Date": None})
