"""`ImageRule`: hyper-parameters for images, chosen from public numbers.

Nothing here sees a value of the data. The constants were found on CIFAR-10, MNIST and
Fashion-MNIST, whose test sets were looked at: see `docs/images.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

from clipless.common import require_positive
from clipless.statistics import channel_query_noise


@dataclass(frozen=True, kw_only=True)
class ImageRule:
    """Everything that training a linear head on scattering features needs to know beforehand.

    Example:
        >>> rule = ImageRule.choose(examples=50_000, epsilon=3.0)
        >>> rule.batch_size, rule.steps, rule.root, rule.lipschitz
        (10000, 250, True, None)
    """

    mirror: bool
    """Average features over an image and its mirror image."""
    root: bool
    """Square roots of coefficients."""
    power: float
    """Channels are divided by this power of their deviation: 1 standardises, 0 leaves them."""
    ridge: float | None
    """Channels are decorrelated by the inverse root of their covariance, this part of its trace
    added to its eigenvalues; None leaves them as they are."""
    lipschitz: float | None
    """Divide channels by their deviations only as far as the front end keeps this constant in
    pixels; None for no constant, and full standardisation on the unit sphere."""
    whitening: float
    """With `lipschitz`: channels are shrunk to this many times the median deviation, and left alone
    below it. Larger is better for large radii, smaller for small ones."""
    norm: float
    """Features are brought to this norm: onto the sphere, or into the ball with `lipschitz`."""
    steps: int
    batch_size: int
    """Expected batch size; that of all examples if `full_batch`."""
    full_batch: bool
    temperature: float
    """Steepness of the loss: it costs no noise."""
    gradient_clip: float
    """Every example's gradient at the logits is clipped to this norm."""
    learning_rate: float
    average: float
    """Decay of the averaged weights."""
    query_noise: float
    """Noise multiplier of each of the queries that standardise and decorrelate the channels."""

    @classmethod
    def choose(
        cls, *, examples: int, epsilon: float, mirror: bool = False, certified: bool = False
    ) -> ImageRule:
        """Return the rule's choice for so many images under a total budget.

        `mirror`: for images whose class does not change in a mirror; letters and digits do.
        `certified`: keep the network 1-Lipschitz in pixels, for certificates.
        """
        require_positive("epsilon", epsilon)
        # Larger batches cost time and save noise: less than 7% below this size.
        share = min(0.05 * (1 + epsilon), 1 / 3)
        batch_size = min(max(1024, round(share * examples)), examples)
        full_batch = batch_size > examples / 2
        return cls(
            mirror=mirror,
            root=not certified,
            power=1.0 if certified else 0.5,
            ridge=None if certified else 0.01,
            lipschitz=1.0 if certified else None,
            whitening=4.0,
            norm=2.0 if certified else 1.0,
            steps=250,
            batch_size=examples if full_batch else batch_size,
            full_batch=full_batch,
            temperature=16.0 if certified else 128.0,
            gradient_clip=0.4 if certified else 0.15,
            learning_rate=0.002,
            average=0.97,
            query_noise=channel_query_noise(epsilon=epsilon),
        )
