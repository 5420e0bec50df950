"""Batches that are dropped as too old, in the log: soon, with the worker's index, and not once each."""

import logging

from lightning_weightsync.collectors.late import EVERY, LateLog


def test_the_first_is_told_at_once_and_later_ones_together(caplog):
    caplog.set_level(logging.INFO, "lightning_weightsync")
    now = [0.0]
    late = LateLog(2, clock=lambda: now[0])
    late.dropped(1, 3)
    late.dropped(0, 5)
    for _ in range(100):
        now[0] += EVERY / 101
        late.dropped(1, 4)
    now[0] = EVERY
    late.dropped(1, 6)
    late.dropped(0, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "worker 1: a batch was dropped as too old, the last one 3 versions (max_staleness=2)",
        "worker 0: a batch was dropped as too old, the last one 5 versions (max_staleness=2)",
        "worker 1: 101 batches were dropped as too old, the last one 6 versions (max_staleness=2)",
        "worker 0: a batch was dropped as too old, the last one 3 versions (max_staleness=2)",
    ]
