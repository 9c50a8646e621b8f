"""Model and devices from a TOML file, as `elche plan pipeline` reads it.

The format is `PIPELINE_FILE_FORMAT`, which the command shows as help. Every mistake is
named with its table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from elche.errors import ConfigError
from elche.schedule.link_efficiency import LINK_EFFICIENCY
from elche.schedule.planning.gpt_profile import GptSize, gpt_layers
from elche.schedule.planning.profile import (
    ADAM_STATE_FACTOR,
    ANY_KIND,
    DeviceProfile,
    LayerProfile,
    LayerTimes,
    LinkProfile,
    PipelineProfile,
)
from elche.schedule.table_values import check_keys, is_number, number, tables

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
  kept_for_weight_bytes = 36e6    # the part that only W frees; default all
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

In place of layers, a GPT by its size, whose operations are counted:
  [gpt]
  blocks = 24
  hidden = 1024
  heads = 16
  vocabulary = 50257
  sequence = 1024
  samples = 1                     # of a microbatch
  bytes_per_value = 2             # of activations
  keeps_scores = false            # attention without a flash kernel keeps them
  [[device]]
  name = "a"
  flops_per_s = 60e12             # that its matmuls reach
"""

_LAYER_BYTES = (
    "activation_bytes",
    "kept_for_weight_bytes",
    "output_bytes",
    "parameter_bytes",
)
_LAYER_KEYS = {"name", "count", "times_s", "backward_s", *_LAYER_BYTES}
_DEVICE_KEYS = {"name", "count", "kind", "speed", "memory_bytes", "flops_per_s"}
_LINK_KEYS = {"latency_s", "bytes_per_s", "efficiency"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """Contents of a file.

    Attributes:
        profile: model and devices.
        microbatches: of one step; None where the file does not say.
    """

    profile: PipelineProfile
    microbatches: int | None


def read_pipeline_file(raw: Mapping[str, Any]) -> PipelineFile:
    """Reads the parsed TOML of a plan file.

    Args:
        raw: the document.

    Raises:
        ConfigError: a key is unknown, missing, or has an impossible value.
    """
    known = {"microbatches", "state_factor", "gpt", "layer", "device", "link"}
    check_keys(raw, known | {"link_between"}, "the file")
    if ("gpt" in raw) == ("layer" in raw):
        raise ConfigError("expected either [gpt] or [[layer]], which the model is")
    devices = _devices(raw)
    if "gpt" in raw:
        layers = gpt_layers(_gpt(raw["gpt"]), {ANY_KIND: 1.0})
    else:
        layers = _layers(raw)
    names = [device.name for device in devices]
    profile = PipelineProfile(
        layers=layers,
        devices=devices,
        link=_link(raw.get("link", {}), "[link]", _LINK_KEYS),
        links=_links(raw, names),
        state_factor=number(raw, "state_factor", "the file", ADAM_STATE_FACTOR),
    )
    microbatches = raw.get("microbatches")
    if microbatches is not None:
        microbatches = _whole(raw, "microbatches", "the file")
    return PipelineFile(profile=profile, microbatches=microbatches)


def _gpt(table: object) -> GptSize:
    where = "[gpt]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table, got {table!r}")
    check_keys(table, {item.name for item in fields(GptSize)}, where)
    needed = ("blocks", "hidden", "heads", "vocabulary", "sequence")
    missing = [name for name in needed if name not in table]
    if missing:
        raise ConfigError(f"{where}: the key {missing[0]!r} is missing")
    keeps_scores = table.get("keeps_scores", False)
    if not isinstance(keeps_scores, bool):
        raise ConfigError(
            f"{where}: expected keeps_scores = true or false, got {keeps_scores!r}"
        )
    sizes = {
        name: _whole(table, name, where) for name in table if name != "keeps_scores"
    }
    try:
        return GptSize(**sizes, keeps_scores=keeps_scores)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _layers(raw: Mapping[str, Any]) -> tuple[LayerProfile, ...]:
    layers: list[LayerProfile] = []
    for index, table in enumerate(tables(raw, "layer")):
        where = f"[[layer]] {index}"
        check_keys(table, _LAYER_KEYS, where)
        times = _times(table, where)
        amounts = {
            key: number(table, key, where) for key in _LAYER_BYTES if key in table
        }
        try:
            layer = LayerProfile(
                times=times, name=_name(table, where, f"layer {index}"), **amounts
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        layers += [layer] * _whole(table, "count", where, 1)
    return tuple(layers)


def _times(table: Mapping[str, Any], where: str) -> dict[str, LayerTimes]:
    """Times by kind; a plain list is for every kind."""
    raw, whole = table.get("times_s"), table.get("backward_s")
    by_kind = raw if isinstance(raw, dict) else {ANY_KIND: raw}
    backward = whole if isinstance(whole, dict) else dict.fromkeys(by_kind, whole)
    times = {}
    for kind, each in by_kind.items():
        of_kind = f" of kind {kind!r}" if kind else ""
        if (
            not isinstance(each, list)
            or len(each) != 3
            or not all(map(is_number, each))
        ):
            raise ConfigError(
                f"{where}: expected times_s = [F, I, W]{of_kind}, got {each!r}"
            )
        own = backward.get(kind)
        if own is not None and not is_number(own):
            raise ConfigError(
                f"{where}: expected a number for backward_s{of_kind}, got {own!r}"
            )
        try:
            times[kind] = LayerTimes(
                forward_s=each[0],
                input_gradient_s=each[1],
                weight_gradient_s=each[2],
                backward_s=own,
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return times


def _devices(raw: Mapping[str, Any]) -> tuple[DeviceProfile, ...]:
    devices: list[DeviceProfile] = []
    for index, table in enumerate(tables(raw, "device")):
        where = f"[[device]] {index}"
        check_keys(table, _DEVICE_KEYS, where)
        if ("flops_per_s" in table) != ("gpt" in raw):
            raise ConfigError(
                f"{where}: flops_per_s goes with [gpt], speed and kind with [[layer]]"
            )
        name = _name(table, where, f"device {index}")
        kind = table.get("kind", ANY_KIND)
        if not isinstance(kind, str):
            raise ConfigError(f"{where}: expected a string for kind, got {kind!r}")
        # With [gpt] a layer's time is its operations, and a device's speed its rate.
        rate = number(table, "flops_per_s", where, 1.0)
        count = _whole(table, "count", where, 1)
        for copy in range(count):
            try:
                devices.append(
                    DeviceProfile(
                        name=f"{name}-{copy}" if count > 1 else name,
                        kind=kind,
                        speed=rate * number(table, "speed", where, 1.0),
                        memory_bytes=number(table, "memory_bytes", where, math.inf),
                    )
                )
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
    return tuple(devices)


def _links(
    raw: Mapping[str, Any], names: list[str]
) -> dict[tuple[int, int], LinkProfile]:
    links: dict[tuple[int, int], LinkProfile] = {}
    for index, table in enumerate(tables(raw, "link_between")):
        where = f"[[link_between]] {index}"
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
        link = _link(table, where, _LINK_KEYS | {"devices"})
        links[min(one, other), max(one, other)] = link
    return links


def _link(table: object, where: str, known: set[str]) -> LinkProfile:
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table, got {table!r}")
    check_keys(table, known, where)
    try:
        return LinkProfile(
            latency_s=number(table, "latency_s", where, 0.0),
            bytes_per_s=number(table, "bytes_per_s", where, math.inf),
            efficiency=number(table, "efficiency", where, LINK_EFFICIENCY),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _name(table: Mapping[str, Any], where: str, default: str) -> str:
    name = table.get("name", default)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: expected a name, got {name!r}")
    return name


def _whole(
    table: Mapping[str, Any], key: str, where: str, default: int | None = None
) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{where}: expected a whole number of at least 1 for {key}, got {value!r}"
        )
    return value
