"""Two ranks with a collective timeout of a second: the first has a block to itself for longer than that, then fails."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from mxref_training.distributed import connect

connect.TIMEOUT = timedelta(minutes=5)  # for the ranks to find each other

started = connect.started_ranks()
try:
    with connect.connected(started) as ranks:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        with ranks.first_alone():
            time.sleep(3 if ranks.first else 0)
            print(f"rank {ranks.rank} was there", flush=True)
        with ranks.first_alone():
            raise ZeroDivisionError("planted")
finally:
    if started.first:  # its process holds the store, in which the other one reads of the failure
        time.sleep(1)
