"""Pipeline schedules as data: actions per rank, their order and cost.

- ``actions``: the value types, in the words of torch.distributed.pipelining.
- ``formats``: text and CSV, also torch's own.
- ``costs``: times per stage and link, and memory.
- ``codes``, ``lowering``: what a schedule must fulfil; sends and receives.
- ``timing``: an event simulation of any list of actions.
- ``schedules``: the published schedules by name; ``auto``: the one of least makespan.
"""
