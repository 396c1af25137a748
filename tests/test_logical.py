"""Which physical layers are one logical layer, by the places of mixtures of experts and of brackets."""

from __future__ import annotations

import pytest

from fxoverlap.passes.logical import logical_layers
from fxoverlap.pattern import parse


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*-*E", "0000"),
        ("E*-", "012"),
        ("*E-EE*", "001123"),
        ("*-*-*-*E*E*E", "012345667788"),
        ("**E*E", "00011"),
        ("***E*E", "012233"),
        ("***EEE", "012234"),
        ("**EE", "0001"),
        ("***E", "0000"),
        ("****E", "01222"),
        ("****EE", "012334"),
        ("*E*****E*E", "0012345566"),
        ("----[*E][*E]", "01234455"),
        ("----[M*E][*E]", "012344455"),
        ("**[*E]", "0122"),
        ("[*]E", "01"),
        ("*[*-]*E", "01122"),
        ("E[*]-", "012"),
    ],
)
def test_logical_layers(pattern: str, expected: str) -> None:
    """What leads to a mixture of experts is one with it; a run that is longer than usual is cut at layer edges."""
    parsed = parse(pattern)
    assert logical_layers([symbol == "E" for symbol in parsed.symbols], parsed.groups) == [int(c) for c in expected]
