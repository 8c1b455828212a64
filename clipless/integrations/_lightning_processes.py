"""`PrivateStrategy`: several processes that train one private model in Lightning."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy


class PrivateStrategy(DDPStrategy):
    """Starts and joins processes as `DDPStrategy` does, and leaves gradients to the engine.

    The engine sums the gradients of all processes, adds the noise once and keeps weights equal.
    `DistributedDataParallel` would average what has no noise, so the model is not wrapped in it.
    """

    def configure_ddp(self) -> None:
        """Leave the model as it is."""
