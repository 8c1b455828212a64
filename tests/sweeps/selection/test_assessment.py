"""What a sweep says of its own price, and that it says too much rather than too little."""

import io
import json
from pathlib import Path

import pytest

from clipless.privacy import FullBatch, Mechanism, PoissonSampling, epsilon
from clipless.sweeps import (
    Repetitions,
    SweepResult,
    TrialRecord,
    pareto_front,
    selected,
    selection_epsilon,
    write_summary,
)
from clipless.sweeps.selection._cost import most_epsilon
from tests.sweeps.worker import definition, release

STEP = Mechanism(
    noise_multiplier=1.0, sampling=PoissonSampling(dataset_size=1000, rate=0.1)
)  # what `release` describes
DRAWN = {"distribution": "geometric", "mean": 4.0}


def record(slot, *, value=0.5, state="complete", history=None, **changes):
    fields = {
        "slot": slot, "state": state, "value": value, "epsilon": 1.0 + slot, "delta": 1e-5,
        "settings": {"training.learning_rate": 0.1}, "attempts": 1,
        "history": release() if history is None else history, "points": ((1, 0.2, 0.5),),
    }  # fmt: skip
    return TrialRecord(**{**fields, **changes})


def result(*trials, declared=None, **sections):
    options = sections.pop("sweep", None)
    sweep = definition(len(trials) or 1, **sections)
    if options:
        given = sweep.to_dict()
        given["sweep"].update(options)
        sweep = type(sweep).from_dict(given)
    return SweepResult(sweep=sweep, trials=trials, folder=Path("nowhere"), declared=declared)


def drawn(*trials, declared=None):
    return result(*trials, repetitions=DRAWN, declared=tuple(declared or [release()]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": "tpe", "pruner": "none"}, "not covered: the tpe sampler"),
        ({"sampler": "gp", "pruner": "none"}, "not covered: the gp sampler"),
        ({"sampler": "random", "pruner": "hyperband"}, "not covered: pruning"),
        ({"sampler": "random", "pruner": "none"}, "not covered: the number of runs was fixed"),
    ],
)
def test_selections_without_a_bound_say_so(options, words):
    cost = result(record(0), record(1), sweep=options, declared=(release(),)).selection
    assert cost.statement.startswith(words)
    assert cost.epsilon is None
    assert not cost.covered
    assert cost.composition == pytest.approx(epsilon([(STEP, 20)], 1e-5))


ADAPTIVE = [{"sampler": "tpe"}, {"sampler": "gp"}, {"pruner": "hyperband"}]


@pytest.mark.parametrize("options", ADAPTIVE)
def test_what_scores_chose_costs_what_was_declared(options):
    """Settings and early ends that follow from scores: each run counts as the worst of them."""
    worse = release(sigma=0.8, count=12)
    trials = (record(0), record(1, state="pruned", history=release(count=3)))
    spent = epsilon([(STEP, 13)], 1e-5)
    one = result(*trials, sweep=options, declared=(release(),)).selection
    assert one.composition > spent
    assert one.composition == pytest.approx(epsilon([(STEP, 20)], 1e-5))
    assert "at the most that it may release" in one.composition_statement
    other = Mechanism(noise_multiplier=0.8, sampling=STEP.sampling)
    both = result(*trials, sweep=options, declared=(release(), worse)).selection
    assert both.composition == pytest.approx(epsilon([(other, 24)], 1e-5, accountant="rdp"))
    unknown = result(*trials, sweep=options).selection
    assert unknown.composition is None
    assert "not declared" in unknown.composition_statement
    more = result(record(0), record(1, history=release(count=11)), sweep=options,
                  declared=(release(),)).selection  # fmt: skip
    assert more.composition is None
    assert "more than was declared" in more.composition_statement
    drawn_at_random = result(*trials).selection
    assert drawn_at_random.composition == pytest.approx(spent)


def test_two_kinds_of_runs_cost_the_worse_of_both_at_every_order():
    """No single kind is the worst at all orders; the choice between them may follow scores."""
    gentle = Mechanism(noise_multiplier=9.0, sampling=FullBatch(dataset_size=1000))
    sharp = Mechanism(noise_multiplier=0.6, sampling=PoissonSampling(dataset_size=1000, rate=0.003))
    kinds = [[(gentle, 20)], [(sharp, 400)]]
    costs = [epsilon([(m, 5 * c) for m, c in kind], 1e-5, accountant="rdp") for kind in kinds]
    assert most_epsilon(kinds, runs=5, delta=1e-5) > max(costs)


def test_one_run_is_no_selection_and_public_data_cost_nobody():
    one = result(record(0)).selection
    assert (one.covered, one.epsilon) == (True, 1.0)
    public = result(record(0), record(1), sweep={"public_data": True}).selection
    assert public.statement.startswith("free")
    assert public.epsilon is None


def test_random_repetitions_are_covered_at_their_price():
    cost = drawn(record(0), record(1), record(2, state="failed", history=[])).selection
    assert cost.covered
    expected = selection_epsilon(
        [[(STEP, 10)]], delta=1e-5, repetitions=Repetitions(distribution="geometric", mean=4.0)
    )
    assert cost.epsilon == expected
    assert "neither the others nor how many" in cost.statement


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        (record(1, history=release(count=11)), "run 1 released more"),
        (record(1, history=release(sigma=0.9)), "run 1 released more"),
        (record(1, history=[*release(), *release(count=1)]), "run 1 released more"),
        (record(1, state="failed", value=None).__class__(
            slot=1, state="failed", settings={}, attempts=1), "run 1 left no account"),
        (record(1, state="running"), "not done"),
        (record(1, state="waiting"), "not done"),
    ],
)  # fmt: skip
def test_anything_unforeseen_voids_the_price(trial, words):
    cost = drawn(record(0), trial).selection
    assert not cost.covered
    assert words in cost.statement
    assert cost.epsilon is None


def test_a_price_needs_a_declaration_and_a_bound():
    assert "not declared" in result(record(0), repetitions=DRAWN).selection.statement
    history = [({**release()[0][0], "relation": "replace_one"}, 10)]
    cost = drawn(record(0, history=history), declared=[history]).selection
    assert "no bound for Poisson sampling under replace-one" in cost.statement
    assert cost.composition is not None


def test_a_draw_of_none_shows_nothing():
    cost = drawn().selection
    assert cost.covered
    assert cost.epsilon is None
    assert "no run was drawn" in cost.statement


def test_composition_counts_everything_that_was_spent():
    trials = [
        record(0),
        record(1, state="pruned", history=release(count=3)),
        record(2, state="failed", value=None, history=release(count=2)),
        record(3, lost_attempts=2),
        TrialRecord(slot=4, state="waiting", settings={}),
    ]
    cost = result(*trials).selection
    assert cost.composition == pytest.approx(epsilon([(STEP, 10 + 3 + 2 + 30)], 1e-5))
    unknown = result(record(0), TrialRecord(slot=1, state="failed", settings={}, attempts=1))
    assert unknown.selection.composition is None
    assert "run 1" in unknown.selection.composition_statement


def test_runs_under_several_relations_have_no_common_price():
    old = [({**release()[0][0], "relation": "add_remove"}, 10)]
    cost = result(record(0), record(1, history=old)).selection
    assert cost.composition is None
    assert "several relations" in cost.composition_statement


def test_the_number_of_runs_stays_secret(tmp_path):
    few, many = (
        SweepResult(
            sweep=definition(1, repetitions=DRAWN),
            trials=(record(0, value=0.9), *(record(k, value=0.5) for k in range(1, count))),
            folder=tmp_path,
            declared=(release(),),
        )
        for count in (1, 9)
    )
    assert selected(few) == selected(many)
    files = write_summary(many)
    assert set(files) == {"sweep", "selected"}
    shown = json.loads(files["selected"].read_text())
    assert shown["epsilon"] == many.selection.epsilon
    assert shown["config"]["training"]["learning_rate"] == 0.1
    assert json.loads(files["sweep"].read_text())["note"].startswith("secret")


def test_front_table_plot_and_files(tmp_path):
    trials = (
        record(0, value=0.90, epsilon=1.0, robustness=0.5),
        record(1, value=0.95, epsilon=2.0, robustness=0.4),
        record(2, value=0.94, epsilon=3.0, robustness=0.6),
        record(3, value=0.93, epsilon=3.0, robustness=0.3),
        record(4, value=0.99, epsilon=0.5, robustness=None, state="pruned"),
    )
    found = SweepResult(
        sweep=definition(5, data={"name": "digits"}), trials=trials, folder=tmp_path
    )
    assert found.best.slot == 1
    assert [trial.slot for trial in found.front] == [0, 1, 2]  # 2 for its robustness
    files = write_summary(found)
    assert files["plot"].read_bytes()[:4] == b"\x89PNG"
    data = json.loads(files["sweep"].read_text())
    assert data["front"] == [0, 1, 2]
    assert data["selection"]["statement"].startswith("not covered")
    assert data["note"].startswith("for the owner")
    best = json.loads(files["best"].read_text())
    assert best == {"data": {"name": "digits"}, "training": {"learning_rate": 0.1}}
    from rich.console import Console

    console = Console(width=200, file=io.StringIO())
    console.print(found.table())
    text = console.file.getvalue()
    assert text.count("*") == 3
    assert "learning_rate" in text
    narrow = Console(width=40, file=io.StringIO())
    narrow.print(found.table())
    assert "…" not in narrow.file.getvalue()  # headings are broken, nothing is cut


def test_fronts():
    assert pareto_front([]) == []
    assert pareto_front([(1.0, 0.5)]) == [0]
    points = [(3.0, 0.9), (1.0, 0.5), (2.0, 0.5), (3.0, 0.95), (0.5, 0.1)]
    assert pareto_front(points) == [4, 1, 3]
    for index in range(len(points)):
        beaten = any(
            other[0] <= points[index][0] and other[1] >= points[index][1]
            for other in points
            if other != points[index]
        )
        assert beaten == (index not in pareto_front(points))
