"""Figures show the numbers that they are given, in one style, and touch no global state."""

import builtins
import sys

import pytest
import torch

import clipless
from clipless import losses
from clipless import nn as lip
from clipless.plots import (
    COLOURS,
    bounds_figure,
    calibration_figure,
    certificate_figure,
    new_figure,
    privacy_utility_figure,
    training_figure,
)

pytest.importorskip("matplotlib")


def lines(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_training_shows_what_is_known():
    history = [
        {"epoch": 1, "loss": 2.0, "accuracy": 0.5, "epsilon_bound": 0.7},
        {"epoch": 2, "loss": 1.0, "accuracy": 0.8, "epsilon_bound": 1.0, "validation_loss": 1.5},
    ]
    figure = training_figure(history, title="a run")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["loss", "accuracy", "epsilon"]
    assert lines(figure.axes[0]) == {
        "training": [[1, 2.0], [2, 1.0]],
        "validation": [[2, 1.5]],
    }
    assert list(lines(figure.axes[2]).values()) == [[[1, 0.7], [2, 1.0]]]
    regression = training_figure([{"epoch": 1, "loss": 2.0, "accuracy": None}])
    assert [axes.get_title() for axes in regression.axes] == ["loss"]


def test_bars_are_the_bounds():
    model = torch.nn.Sequential(
        lip.BoundedInput(2.0), lip.SpectralLinear(4, 4), lip.GroupSort(2), lip.SpectralLinear(4, 2)
    )
    report = clipless.sensitivity(model, loss=losses.CrossEntropy(), input_shape=(4,))
    (axes,) = report.plot_bounds().axes
    names = [label.get_text() for label in axes.get_yticklabels()][::-1]
    assert names == list(report.gradient_bounds)  # the first layer is at the top
    drawn = [bar.get_width() for bar in axes.patches][::-1]
    assert drawn == pytest.approx(list(report.gradient_bounds.values()))


def test_many_parameters_are_cut_to_the_largest_and_it_says_so():
    bounds = {f"layer{k}": float(k) for k in range(100)}
    (axes,) = bounds_figure(bounds, title="deep").axes
    assert min(bar.get_width() for bar in axes.patches) == 60.0
    assert "40 largest of 100" in axes.get_title()


def test_points_of_one_epsilon_are_averaged_and_shown():
    (axes,) = privacy_utility_figure([(3.0, 0.9), (1.0, 0.6), (1.0, 0.8)], baseline=0.5).axes
    mean = axes.get_lines()[0].get_xydata()
    assert mean[:, 0].tolist() == [1.0, 3.0]
    assert mean[:, 1] == pytest.approx([0.7, 0.9])
    assert len(axes.collections[0].get_offsets()) == 3


def test_calibration_error_is_the_mean_distance_from_the_diagonal():
    # Two bins: 0.95 sure and always right (off by 0.05), 0.55 sure and right half of the time.
    figure = calibration_figure([0.95] * 2 + [0.55] * 2, [True, True, True, False])
    assert "0.050" in figure.axes[0].get_title()
    assert lines(figure.axes[0])["model"] == [
        pytest.approx([0.55, 0.5]), pytest.approx([0.95, 1.0])
    ]  # fmt: skip


def test_certified_accuracy_draws_its_curve():
    from clipless.robustness import certified_accuracy

    model = torch.nn.Sequential(lip.BoundedInput(2.0), lip.SpectralLinear(4, 3))
    result = certified_accuracy(model, torch.randn(30, 4), torch.randint(3, (30,)))
    (axes,) = result.plot().axes
    radii = axes.get_lines()[0].get_xdata().tolist()
    assert radii == pytest.approx(list(result.curve_radii))


@pytest.mark.parametrize(
    "empty",
    [
        lambda: training_figure([]),
        lambda: bounds_figure({}),
        lambda: privacy_utility_figure([]),
        lambda: certificate_figure({}),
        lambda: calibration_figure([], []),
        lambda: calibration_figure([0.5], [True, False]),
    ],
)
def test_nothing_to_plot_is_said(empty):
    with pytest.raises(ValueError, match=r"plot|needed"):
        empty()


def test_a_fit_draws_its_history():
    from clipless.training import Trainer

    x = torch.randn(200, 4)
    model = torch.nn.Sequential(lip.BoundedInput(2.0), lip.SpectralLinear(4, 2))
    trainer = Trainer(
        model, losses.CrossEntropy(tau=5.0), noise_multiplier=2.0, batch_size=50, epochs=2
    )
    figure = trainer.fit((x, (x[:, 0] > 0).long())).plot()
    assert [axes.get_title() for axes in figure.axes][:2] == ["loss", "accuracy"]


def test_style_is_one_and_global_state_is_left_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    figure, panels = new_figure(panels=2)
    assert len(panels) == len(figure.axes) == 2
    assert panels[0].plot([0, 1], [0, 1])[0].get_color() == COLOURS[0]
    assert dict(mpl.rcParams) == before


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    whole = builtins.__import__

    def without(name, *arguments, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return whole(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"clipless\[plots\]"):
        new_figure()
    assert "clipless.plots" in sys.modules
