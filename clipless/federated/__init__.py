"""Federated training: clients train on their own data, and updates are summed in whole numbers.

What is protected is a client, with all its records. Noise is added to the sum by a trusted server,
or in shares by the clients, so that the sum alone is safe to open. No framework is needed;
`clipless.integrations` has the parts for Flower.
"""

from clipless.federated._client import FederatedClient
from clipless.federated._cost import FederatedCost
from clipless.federated._grid import decoded_update, encoded_update, excess
from clipless.federated._server import FederatedServer, RoundResult
from clipless.federated._shares import SHARE_STEPS, NoiseShare, largest_error
from clipless.federated._task import RoundTask
from clipless.federated._terms import FederatedTerms

__all__ = [
    "FederatedClient",
    "FederatedCost",
    "FederatedServer",
    "FederatedTerms",
    "NoiseShare",
    "RoundResult",
    "RoundTask",
    "SHARE_STEPS",
    "decoded_update",
    "encoded_update",
    "excess",
    "largest_error",
]
