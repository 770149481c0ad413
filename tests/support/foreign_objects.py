"""Whole request objects of other servers, as a client sends that writes down every field."""

from __future__ import annotations

from typing import Any

from srt.sampling.foreign_table import FIELDS, VERSIONS

# It asks for something by default too: a limit on the output, which has another name here.
MEANT = frozenset((("sampling_params", "max_tokens"),))


def whole_objects(family: str) -> list[dict[str, Any]]:
    """What the first and the last version of each package sends for this family where nothing is set: all fields at their defaults
    at once."""
    wholes: list[dict[str, Any]] = []
    for package in VERSIONS:
        of_package = {name: by[package] for name, by in FIELDS[family].items() if by.get(package)}
        for version in (0, -1) if of_package else ():
            whole = {name: defaults[version] for name, defaults in of_package.items() if (family, name) not in MEANT}
            if whole not in wholes:
                wholes.append(whole)
    return wholes
