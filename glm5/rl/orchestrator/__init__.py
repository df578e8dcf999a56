"""Asynchronous rollouts: they go on while the trainer learns, and nothing stale is trained (docs/rl-async.md).

    dispatcher.py    which group may start, so that few become stale; every one that starts is ended exactly once
    sink.py          groups that ended: staleness, repair, batches with every task's share
    concurrency.py   how many rollouts at a time, by the use of the engine's KV cache
    rollouts.py      the same with an engine and environments, as tasks of asyncio

The first three know no clock, no engine and no tensors: a simulation drives them through random schedules.
"""
