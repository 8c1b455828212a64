"""Tables and plots of the image benchmarks, with published figures beside ours."""

import json
import statistics
from collections import defaultdict

from _results import RESULTS, save_figure

from clipless.plots import COLOURS, INK, new_figure

LEGEND = {"frameon": False, "labelcolor": INK, "fontsize": 9}
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
    """Write `images.svg` and `images-certificates.svg`: accuracy over epsilon, and certified."""
    blue, orange, grey, _ = COLOURS
    names = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
    figure, panels = new_figure(panels=3, width=3.2, height=4.4)
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        for label, prior, colour in (("scattering", False, blue), ("random prior", True, orange)):
            points = sorted(
                (row["epsilon"], row["mean"], row["spread"])
                for (dataset, recipe), row in summary().items()
                if dataset == name and ("random-prior" in recipe) == prior
            )
            if points:
                x, y, spread = zip(*points, strict=True)
                axes.errorbar(x, y, yerr=spread, marker="o", color=colour, label=label)
        numbers = {}
        for (dataset, epsilon), others in PUBLISHED.items():
            for whose, value in others.items() if dataset == name else ():
                number = numbers.setdefault(whose, len(numbers) + 1)
                axes.text(
                    epsilon, value, str(number), color=grey, fontsize=9, ha="center", va="center"
                )
                axes.plot(epsilon, value, color=grey)  # so that the axes reach there
        axes.set(title=title, xlabel="epsilon at delta 1e-5", ylabel="accuracy (%)")
        axes.margins(0.12)
        for whose, number in numbers.items():
            axes.plot([], [], " ", label=f"{number}  {whose}")
        axes.legend(**LEGEND, loc="upper center", bbox_to_anchor=(0.5, -0.2), handlelength=1.2)
    save_figure(figure, RESULTS / "images.svg")

    figure, (axes,) = new_figure(width=5.6, height=3.4)
    for label, table, style, colour in (
        ("clipless, epsilon 20", certificate_rows(20.0), "-o", blue),
        ("clipless, epsilon 1", certificate_rows(1.0), "-o", orange),
        ("paper, epsilon 20", PAPER_CERTIFICATES, "--x", grey),
    ):
        if table:
            best = [max(row[0][i] for row in table.values()) for i in range(len(PAPER_RADII))]
            axes.plot(PAPER_RADII, best, style, color=colour, label=label, markersize=4)
    axes.set(title="CIFAR-10, best temperature of each radius", xlabel="radius times 255",
             ylabel="certified accuracy (%)")  # fmt: skip
    axes.legend(**LEGEND)
    save_figure(figure, RESULTS / "images-certificates.svg")
