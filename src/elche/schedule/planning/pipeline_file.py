"""Model and devices from a TOML file, as `elche plan pipeline` reads it.

`PIPELINE_FILE_FORMAT` describes the format; the command shows it as help. Every error
names its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elche.errors import ConfigError
from elche.schedule.planning.profile import (
    ADAM_STATE_FACTOR,
    ANY_KIND,
    DeviceProfile,
    LayerProfile,
    LayerTimes,
    LinkProfile,
    PipelineProfile,
)
from elche.schedule.table_values import (
    check_keys,
    read_table,
    tables,
    three_times,
    whole,
)

PIPELINE_FILE_FORMAT = """\
The file; times and bytes are those of one microbatch:
  microbatches = 16
  state_factor = 4.0              # bytes held per byte of parameters; Adam: 4
  [[layer]]                       # in the model's order
  name = "block"
  count = 24
  times_s = [0.01, 0.01, 0.01]    # F, I, W; or { gpu = [...], cpu = [...] }
  backward_s = 0.019              # whole backward at once; default I + W
  activation_bytes = 40e6         # held from F to W
  output_bytes = 4e6              # the message to the next device
  parameter_bytes = 50e6
  [[device]]
  name = "a"
  count = 1
  kind = "gpu"                    # whose times it has; optional
  speed = 1.0                     # divides the times of its kind
  memory_bytes = 16e9             # optional
  [link]                          # between all devices; optional
  latency_s = 20e-6
  bytes_per_s = 10e9
  efficiency = 0.8                # part of it that payload reaches; 1 if measured so
  [[link_between]]                # two devices that differ; optional
  devices = ["a", "b"]
  bytes_per_s = 1e9
"""


def read_pipeline_file(raw: Mapping[str, Any]) -> tuple[PipelineProfile, int | None]:
    """Model and devices, and the microbatches per step if the file names them.

    Raises:
        ConfigError: a key is unknown, missing, or has an impossible value.
    """
    known = {"microbatches", "state_factor", "layer", "device", "link"}
    if "gpt" in raw:
        raise ConfigError(
            "[gpt] and flops_per_s were removed: write [[layer]] tables with times_s, "
            "and the speed of each [[device]]"
        )
    check_keys(raw, known | {"link_between"}, "the file")
    devices = _devices(raw)
    profile = PipelineProfile(
        layers=_layers(raw),
        devices=devices,
        link=read_table(LinkProfile, "[link]", raw.get("link", {})),
        links=_links(raw, [device.name for device in devices]),
        state_factor=raw.get("state_factor", ADAM_STATE_FACTOR),
    )
    count = whole(raw, "microbatches", "the file") if "microbatches" in raw else None
    return profile, count


def _layers(raw: Mapping[str, Any]) -> tuple[LayerProfile, ...]:
    layers: list[LayerProfile] = []
    for index, (where, table) in enumerate(tables(raw, "layer")):
        layer = read_table(
            LayerProfile,
            where,
            {"name": f"layer {index}", **table},
            also={"count", "times_s", "backward_s"},
            hidden={"times"},
            times=_times(table, where),
        )
        layers += [layer] * whole(table, "count", where)
    return tuple(layers)


def _times(table: Mapping[str, Any], where: str) -> dict[str, LayerTimes]:
    """Times by kind; a plain list applies to every kind."""
    raw, backward = table.get("times_s"), table.get("backward_s")
    by_kind = raw if isinstance(raw, dict) else {ANY_KIND: raw}
    times = {}
    for kind, each in by_kind.items():
        place = f"{where}, kind {kind!r}" if kind else where
        names = ("forward_s", "input_gradient_s", "weight_gradient_s")
        values = dict(zip(names, three_times(each, place, "times_s"), strict=True))
        own = backward.get(kind) if isinstance(backward, dict) else backward
        if own is not None:
            values["backward_s"] = own
        times[kind] = read_table(LayerTimes, place, values)
    return times


def _devices(raw: Mapping[str, Any]) -> tuple[DeviceProfile, ...]:
    devices: list[DeviceProfile] = []
    for index, (where, table) in enumerate(tables(raw, "device")):
        device = read_table(
            DeviceProfile,
            where,
            {"name": f"device {index}", **table},
            also={"count"},
        )
        count = whole(table, "count", where)
        names = [f"{device.name}-{copy}" for copy in range(count)]
        devices += [
            replace(device, name=name)
            for name in (names if count > 1 else [device.name])
        ]
    return tuple(devices)


def _links(
    raw: Mapping[str, Any], names: list[str]
) -> dict[tuple[int, int], LinkProfile]:
    links: dict[tuple[int, int], LinkProfile] = {}
    for where, table in tables(raw, "link_between"):
        pair = table.get("devices")
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or pair[0] == pair[1]
            or not all(name in names for name in pair)
        ):
            raise ConfigError(
                f"{where}: expected devices = two of {', '.join(names)}, got {pair!r}"
            )
        one, other = names.index(pair[0]), names.index(pair[1])
        link = read_table(LinkProfile, where, table, also={"devices"})
        links[min(one, other), max(one, other)] = link
    return links
