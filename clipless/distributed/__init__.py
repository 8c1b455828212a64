"""Processes that train one model together: messages, ownership of parameters, shards."""

from clipless.distributed._fingerprint import fingerprint
from clipless.distributed._group import Team, meeting
from clipless.distributed._ownership import share_weights
from clipless.distributed._processes import Processes, processes_present, rank_and_size
from clipless.distributed._sharded import (
    is_sharded,
    joined,
    load_whole_optimizer_state,
    load_whole_state,
    local,
    noise_prefix,
    reshard,
    uncovered,
    whole,
    whole_optimizer_state,
    whole_state,
    write,
)
from clipless.distributed._sharded_group import ShardedTeam, refuse_compiled

__all__: list[str] = [
    "Processes",
    "ShardedTeam",
    "Team",
    "fingerprint",
    "is_sharded",
    "joined",
    "load_whole_optimizer_state",
    "load_whole_state",
    "local",
    "meeting",
    "noise_prefix",
    "processes_present",
    "rank_and_size",
    "refuse_compiled",
    "reshard",
    "share_weights",
    "uncovered",
    "whole",
    "whole_optimizer_state",
    "whole_state",
    "write",
]
