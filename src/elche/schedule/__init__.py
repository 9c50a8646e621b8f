"""Pipeline schedules as data: actions per rank, their order and cost.

- ``actions``: the value types, named as in torch.distributed.pipelining.
- ``formats``: CSV, including torch's own.
- ``costs``: times per stage and link, and memory.
- ``codes``, ``lowering``: validity checks; sends and receives.
- ``timing``: an event simulation of any list of actions.
- ``schedules``: published schedules by name; ``auto``: the one of least makespan.
"""
