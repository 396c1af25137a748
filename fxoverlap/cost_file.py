"""Costs that a user gives as a JSON file: `OverlapConfig.costs`.

    {"hardware": {"preset": "h100", "latency_s": 2e-5},
     "nodes": [{"name": "L0.experts.F", "ms": 1.2}, {"name": "experts.F", "ms": 1.0}]}

Both keys may be missing. `hardware` is a preset ("cpu" if it names none) with other values for some fields of
`Hardware`. `nodes` gives the milliseconds that a node takes on its lane by itself; a name without its layer stands for
that node of every layer, and the full name wins over it. An `ms` of null counts as not given; a row of a
report has `planned_ms`, what plans were made by, which counts instead. Other keys, at the top
and in rows, are left alone, so that what `Report.to_dict` gives can be read back.

Whatever is wrong raises ConfigError.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from fxoverlap.errors import ConfigError
from fxoverlap.hardware import DEFAULT, PRESETS, Hardware


@dataclass(frozen=True, slots=True)
class CostFile:
    """What such a file holds.

    Attributes:
        path: where it was read.
        hardware: the machine.
        seconds: by name of the node, with or without its layer.
    """

    path: str
    hardware: Hardware
    seconds: Mapping[str, float]

    def of(self, name: str) -> float | None:
        """The seconds of a node, None if they are not given."""
        return self.seconds.get(name, self.seconds.get(_without_layer(name)))

    def check_names(self, known: Iterable[str]) -> None:
        """Raise ConfigError if a row is for none of these nodes."""
        names = list(known)
        allowed = {*names, *map(_without_layer, names)}
        for name in self.seconds:
            if name not in allowed:
                raise ConfigError(
                    f"{self.path}: the row {name!r} is for no schedule node of the model, expected a name such as "
                    f"{', '.join(names[:3])}. Take names from overlapped.report(), and leave out what the model lacks."
                )


def is_path(costs: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a value of `OverlapConfig.costs` is a file."""
    return isinstance(costs, os.PathLike) or (isinstance(costs, str) and costs.endswith(".json"))


def read(path: str | os.PathLike[str]) -> CostFile:
    """Read and check a file."""
    shown = os.fspath(path)
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"OverlapConfig.costs is {shown!r}, which cannot be read: {error}.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{shown} is no JSON: {error}. Expected an object with the keys hardware and nodes."
        ) from error
    _expect(isinstance(found, dict), shown, "the file", found, 'an object such as {"hardware": {...}, "nodes": [...]}')
    return CostFile(shown, _hardware(shown, found.get("hardware", {})), _seconds(shown, found.get("nodes", [])))


def _hardware(path: str, given: Any) -> Hardware:
    _expect(isinstance(given, dict), path, "hardware", given, "an object with a preset and fields of Hardware")
    preset = given.get("preset", DEFAULT)
    _expect(isinstance(preset, str) and preset in PRESETS, path, "hardware.preset", preset, ", ".join(PRESETS))
    hardware = PRESETS[preset]
    allowed = {each.name: type(getattr(hardware, each.name)) for each in fields(Hardware)}
    changes = {name: value for name, value in given.items() if name != "preset"}
    for name, value in changes.items():
        _expect(name in allowed, path, "a field of hardware", name, ", ".join(["preset", *allowed]))
        _expect(*_verdict(path, name, value, allowed[name]))
    return replace(hardware, **changes)


def _verdict(path: str, name: str, value: Any, kind: type) -> tuple[bool, str, str, Any, str]:
    """The arguments of `_expect` for a field of the hardware."""
    subject = f"hardware.{name}"
    if kind is str:
        return isinstance(value, str), path, subject, value, "a text"
    if kind is bool:
        return isinstance(value, bool), path, subject, value, "true or false"
    if kind is int:
        return _is_number(value) and value >= 1 and value == int(value), path, subject, value, "an integer from 1 on"
    if name in ("efficiency", "comm_share"):
        fits = _is_number(value) and (0 < value <= 1 or (name == "comm_share" and value == 0))
        return fits, path, subject, value, "a share, from 0 to 1" + (", but not 0" if name == "efficiency" else "")
    if name in ("latency_s", "node_s", "launch_s"):
        return _is_number(value) and value >= 0, path, subject, value, "a number of seconds from 0 on"
    return _is_number(value) and value > 0, path, subject, value, "a number above 0"


def _seconds(path: str, given: Any) -> dict[str, float]:
    _expect(isinstance(given, list), path, "nodes", given, 'a list of rows {"name": ..., "ms": ...}')
    found: dict[str, float] = {}
    for i, row in enumerate(given):
        subject = f"nodes[{i}]"
        _expect(isinstance(row, dict), path, subject, row, 'a row {"name": ..., "ms": ...}')
        name, ms = row.get("name"), row.get("planned_ms", row.get("ms"))
        _expect(isinstance(name, str), path, f"{subject}.name", name, "the name of a schedule node")
        if ms is None:
            continue
        _expect(_is_number(ms) and ms >= 0, path, f"{subject}.ms ({name})", ms, "milliseconds from 0 on, or null")
        _expect(name not in found, path, f"{subject}.name", name, "each name once")
        found[name] = ms / 1e3
    return found


def _expect(holds: bool, path: str, subject: str, actual: Any, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{path}: {subject} is {actual!r}; allowed: {expected}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _without_layer(name: str) -> str:
    """`experts.F` of `L0.experts.F`; a name without a layer as it is."""
    first, _, rest = name.partition(".")
    return rest if first[:1] == "L" and first[1:].isdigit() else name
