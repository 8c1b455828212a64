"""The trainer with augmented views: it trains, resumes bit for bit, and knows its own folder."""

import pytest
import torch

from clipless.errors import PrivacyError
from tests.training.small import DATA, STEPS, StopAt, counted, same, trainer, weights


def jitter(batch, generator):
    return batch + 0.1 * torch.randn(batch.shape, generator=generator)


def flip(batch, generator):
    chosen = torch.rand(len(batch), 1, generator=generator) < 0.5
    return torch.where(chosen, batch.flip(-1), batch)


def test_views_change_the_training_and_not_its_price():
    plain = trainer()
    expected = plain.fit(DATA)
    for options in ({"augment": jitter}, {"augment": jitter, "views": 3, "pad": True}):
        trained = trainer(**options)
        result = trained.fit(DATA)
        assert result.steps == STEPS
        assert result.epsilon == pytest.approx(expected.epsilon, rel=1e-6)
        assert not same(weights(trained), weights(plain))
        assert 0.0 <= result.history[-1]["accuracy"] <= 1.0
    assert trained.engine.plan.views == 3


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 4}, {"pad": True}])
def test_a_crashed_run_ends_at_the_same_weights(tmp_path, options):
    options = {"augment": jitter, "views": 2, **options}
    seen = {}

    class Look(StopAt):
        def on_step_end(self, trainer):
            seen[trainer.step] = weights(trainer)
            super().on_step_end(trainer)

    for stop in (8, 14, 19):
        with pytest.raises(RuntimeError, match="stop"):
            trainer(tmp_path, **options, callbacks=[Look(stop)]).fit(DATA)
        expected = dict(seen)
    last = trainer(tmp_path, **options, callbacks=[Look(-1)])
    result = last.fit(DATA)
    assert result.resumed_from == 15
    for step, value in expected.items():
        assert same(seen[step], value)
    assert result.steps == counted(tmp_path) == STEPS  # nothing was paid twice


def test_another_augmentation_is_another_run(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path, augment=jitter, views=2, callbacks=[StopAt(7)]).fit(DATA)
    with pytest.raises(PrivacyError, match="views: 2 then, 3 now"):
        trainer(tmp_path, augment=jitter, views=3).fit(DATA)
    with pytest.raises(PrivacyError, match="augmentation: jitter then, flip now"):
        trainer(tmp_path, augment=flip, views=2).fit(DATA)
    with pytest.raises(PrivacyError, match="augmentation: jitter then, None now"):
        trainer(tmp_path).fit(DATA)
    assert trainer(tmp_path, augment=jitter, views=2).fit(DATA).steps == STEPS
