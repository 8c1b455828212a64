"""`clipless budget`: the three questions, a run's spending, the picture, the words."""

import math

import pytest

from clipless import privacy
from clipless.cli._epsilon_meaning import best_advantage, best_detection, meaning, membership_limit
from tests.cli.shell import here, refused, shell

SIZE = ("--examples", "60000", "--batch-size", "600")


def test_noise_for_epsilon(tmp_path):
    plot = tmp_path / "curve.png"
    flags = ("--epsilon", "3", "--steps", "500", "--plot", plot, "--json")
    outcome = shell("budget", *flags, *SIZE, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    said = outcome.json
    assert said["asked_for"] == "noise_multiplier"
    assert 2.95 < said["epsilon"] <= 3.0
    assert said["delta"] == 1e-6
    sampling = privacy.PoissonSampling(dataset_size=60_000, rate=0.01)
    mechanism = privacy.Mechanism(noise_multiplier=said["noise_multiplier"], sampling=sampling)
    assert said["epsilon"] == privacy.epsilon([(mechanism, 500)], 1e-6)
    curve = [(each["steps"], each["epsilon"]) for each in said["curve"]]
    assert curve[-1] == (500, said["epsilon"])
    assert curve == sorted(curve)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_epsilon_for_noise_and_steps_for_both():
    said = here("budget", "--noise-multiplier", "1.1", "--epochs", "2", *SIZE, "--json").json
    assert (said["asked_for"], said["steps"]) == ("epsilon", 200)
    flags = ("--noise-multiplier", "1.1", "--epsilon", str(said["epsilon"] + 1e-9))
    back = here("budget", *flags, *SIZE, "--json").json
    assert back["asked_for"] == "steps"
    assert back["steps"] >= 200
    assert back["epsilon"] <= said["epsilon"] + 1e-9


def test_fixed_size_and_full_batch_have_their_own_accounting():
    flags = ("--noise-multiplier", "4", "--steps", "10", "--examples", "1000", "--json")
    fixed = here("budget", *flags, "--batch-size", "100", "--sampling", "fixed_size").json
    full = here("budget", *flags, "--sampling", "full_batch").json
    assert fixed["relation"] == "replace_one"
    assert full["sampling"]["kind"] == "full_batch"
    assert full["relation"] == "zero_out"


def test_people_are_told_what_it_means():
    outcome = here("budget", "--noise-multiplier", "1.1", "--steps", "200", *SIZE)
    assert "differential privacy" in outcome.out
    assert "one person's example been left out" in outcome.out
    assert "█" in outcome.out


def test_noise_for_a_risk():
    flags = ("--max-attack-accuracy", "0.6", "--steps", "100", *SIZE)
    said = here("budget", *flags, "--json").json
    assert said["asked_for"] == "noise_multiplier"
    assert said["trade_off"]["attack_accuracy"]["0.5"] <= 0.6
    assert said["trade_off"]["advantage"] == pytest.approx(0.2, abs=1e-3)
    sampling = privacy.PoissonSampling(dataset_size=60_000, rate=0.01)
    mechanism = privacy.Mechanism(noise_multiplier=said["noise_multiplier"], sampling=sampling)
    assert privacy.delta([(mechanism, 100)], 0.0) <= 0.2
    assert "is right at most" in here("budget", *flags).out
    assert refused(here("budget", *flags, "--epsilon", "3"), 2, "not both")
    assert refused(here("budget", *flags, "--base-rate", "0.2"), 2, "blind guesses reach")


def test_of_a_run(run):
    said = here("budget", run, "--json").json
    assert said["asked_for"] == "spent"
    assert said["steps"] == 30
    assert 2.9 < said["epsilon"] <= 3.0
    (run / "ledger.jsonl").unlink()
    assert refused(here("budget", run), 5, "ledger.jsonl")
    assert refused(here("budget", run, "--steps", "3"), 2, "its own numbers")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--epsilon", "3", *SIZE), 2, ("two of the three",)),
        (("--epsilon", "3", "--noise-multiplier", "1", "--steps", "5", *SIZE), 2, ("two of",)),
        (("--epsilon", "3", "--steps", "5", "--epochs", "1", *SIZE), 2, ("not both",)),
        (("--epsilon", "3", "--steps", "5"), 2, ("--examples",)),
        (("--epsilon", "-3", "--steps", "5", *SIZE), 2, ("above 0",)),
        (("--epsilon", "3", "--steps", "0", *SIZE), 2, ("at least one step",)),
        (("--epsilon", "3", "--steps", "5", "--delta", "2", *SIZE), 2, ("delta",)),
        (("--epsilon", "3", "--steps", "5", "--delta", "1e-4", *SIZE), 6, ("at least 1/N",)),
        (("--epsilon", "3", "--steps", "5", "--sampling", "shuffle", *SIZE), 2, ("shuffle",)),
        (("--epsilon", "0.01", "--noise-multiplier", "0.3", *SIZE), 4, ("not even one step",)),
    ],
)
def test_bad_questions(flags, code, words):
    assert refused(here("budget", *flags), code, *words)


def test_the_words_are_bounds():
    """Against the exact trade-off of a Gaussian mechanism, which is what a step is."""
    sampling = privacy.FullBatch(dataset_size=100)
    history = [(privacy.Mechanism(noise_multiplier=1.0, sampling=sampling), 1)]
    epsilon = privacy.epsilon(history, 1e-5)
    for false_alarms in (0.001, 0.01, 0.1, 0.5):
        true_rate = _normal(_quantile(false_alarms) + 1.0)
        assert true_rate <= best_detection(epsilon, 1e-5, false_alarms=false_alarms)
    assert 2 * _normal(0.5) - 1 <= best_advantage(epsilon, 1e-5)
    assert best_advantage(0.0, 0.0) == 0.0
    assert best_detection(0.0, 0.0, false_alarms=0.25) == pytest.approx(0.25)
    assert membership_limit(1.0, 1e-5, replaced=False) > best_advantage(1.0, 1e-5)
    assert membership_limit(1.0, 1e-5, replaced=True) == best_advantage(1.0, 1e-5)
    assert best_advantage(1000.0, 1e-5) == 1.0
    assert "nothing is promised" in meaning(math.inf, 1e-5)


def _normal(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _quantile(p):
    low, high = -10.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _normal(middle) < p else (low, middle)
    return low
