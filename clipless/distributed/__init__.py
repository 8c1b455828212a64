"""Processes that train one model together: messages, ownership of parameters, shards."""

from clipless.distributed._group import (
    DataParallelGroup,
    ProcessGroup,
    fingerprint,
    noise_prefix,
)
from clipless.distributed._ownership import share_weights
from clipless.distributed._processes import (
    Processes,
    SingleProcess,
    processes_present,
    rank_and_size,
)
from clipless.distributed._sharded import (
    full_optimizer_state,
    full_state,
    full_tensor,
    gathered_parameters,
    is_sharded,
    load_full_optimizer_state,
    load_full_state,
    local,
    reshard,
    without_sharding,
    write,
)
from clipless.distributed._sharded_group import ShardedGroup

__all__: list[str] = [
    "DataParallelGroup",
    "ProcessGroup",
    "Processes",
    "ShardedGroup",
    "SingleProcess",
    "fingerprint",
    "full_optimizer_state",
    "full_state",
    "full_tensor",
    "gathered_parameters",
    "is_sharded",
    "load_full_optimizer_state",
    "load_full_state",
    "local",
    "noise_prefix",
    "processes_present",
    "rank_and_size",
    "reshard",
    "share_weights",
    "without_sharding",
    "write",
]
