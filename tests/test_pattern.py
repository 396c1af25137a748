"""The layer pattern language by example: what parses, what is refused and where, and what each pipeline rank holds.

The patterns of `MEGATRON` are those of Megatron-LM's documentation and tests (`fxoverlap/pattern.py` names the files).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import fxoverlap as fxo
from fxoverlap.models import HybridModel
from fxoverlap.pattern import LATENT, NAMESPACES, SYMBOLS, Pattern, Segment, parse

TWO = Pattern("*E", ((0, 2),))

PARSED = {
    "*": Pattern("*"),
    "M+G-E": Pattern("M+G-E"),
    "GDCHWE": Pattern("GDCHWE"),
    "[*E][*-]": Pattern("*E*-", ((0, 2), (2, 4))),
    "*[E]-[-*]E": Pattern("*E--*E", ((1, 2), (3, 5))),
    "[M*E]G": Pattern("M*EG", ((0, 3),)),
    "*-|*E": Pattern("*-*E", pipes=(2,)),
    "[*-][*-]|[*E][*E]": Pattern("*-*-*E*E", ((0, 2), (2, 4), (4, 6), (6, 8)), pipes=(4,)),
    "||M": Pattern("M", pipes=(0, 0)),
    "M||": Pattern("M", pipes=(1, 1)),
    "[M]||[E]M|": Pattern("MEM", ((0, 1), (1, 2)), pipes=(1, 1, 3)),
    "M/*": Pattern("M", mtp=Pattern("*"), depths=1),
    "[*E][*-]/[*E]/[*E]": Pattern("*E*-", ((0, 2), (2, 4)), TWO, 2),
    "[*E]|-/[*E]": Pattern("*E-", ((0, 2),), TWO, 1, (2,)),
    "M/[G-]*E/[G-]*E/[G-]*E": Pattern("M", mtp=Pattern("G-*E", ((0, 2),)), depths=3),
    "/[*E]": Pattern("", mtp=TWO, depths=1),
    "|/[*E]": Pattern("", mtp=TWO, depths=1, pipes=(0,)),
    "M*/": Pattern("M*", blanks=1),
    "M|*//": Pattern("M*", pipes=(1,), blanks=2),
}

MEGATRON: list[tuple[str, str, str | None, int]] = [  # text, trunk without pipes and brackets, MTP part, depths
    ("M*M*", "M*M*", None, 0),
    ("MM-*", "MM-*", None, 0),
    ("GEGEGE*E", "GEGEGE*E", None, 0),
    ("MDMD", "MDMD", None, 0),
    ("M[M*]-", "MM*-", None, 0),
    ("[M*E]", "M*E", None, 0),
    ("M*|M*", "M*M*", None, 0),
    ("M|M|M|M", "MMMM", None, 0),
    ("M-M-|M-M*-|M-M-|M-M*-", "M-M-M-M*-M-M-M-M*-", None, 0),
    ("M*M*/MM/MM", "M*M*", "MM", 2),
    ("MMMM/*M/*M/*M", "MMMM", "*M", 3),
    ("M/M/M/M/M", "M", "M", 4),
    ("MM-MM-/*M/*M", "MM-MM-", "*M", 2),
    ("*****/M/M/M/M", "*****", "M", 4),
    ("MEME/MM/MM", "MEME", "MM", 2),
    ("MDMD/MD/MD", "MDMD", "MD", 2),
    ("M-M-|M-M*-/MM/MM", "M-M-M-M*-", "MM", 2),
    ("/MM/MM", "", "MM", 2),
    ("M*M*/", "M*M*", None, 0),
]

REFUSED: list[tuple[str, int, str]] = [  # text, position of the caret, what the message says
    # brackets
    ("*[*E", 1, '"[" without a "]"'),
    ("M/[*E", 2, '"[" without a "]"'),
    ("*E]", 2, '"]" without a "["'),
    ("[*E]]", 4, '"]" without a "["'),
    ("M|*]", 3, '"]" without a "["'),
    ("M/*]", 3, '"]" without a "["'),
    ("*[]", 1, "an empty group"),
    ("*/[]", 2, "an empty group"),
    ("[*[E]]", 2, "a group inside a group"),
    ("*/[[E]]", 3, "a group inside a group"),
    # symbols
    ("[*X]", 2, "unknown symbol 'X'"),
    ("* E", 1, "unknown symbol ' '"),
    ("M*m", 2, "unknown symbol 'm'"),
    ("M/MX/MX", 3, "unknown symbol 'X'"),
    # members of a group
    ("[*E-]", 3, "a layer after E"),
    ("M[EM]", 3, "a layer after E"),
    ("[EE]", 2, "a layer after E"),
    ("M/[EM]", 4, "a layer after E"),
    ("[MM]", 2, "'M' in a group with 'M', both of checkpoint namespace 'mixer'"),
    ("*[M*M]", 4, "'M' in a group with 'M', both of checkpoint namespace 'mixer'"),
    ("[**E]", 2, "'*' in a group with '*', both of checkpoint namespace 'self_attention'"),
    ("[G*]", 2, "'*' in a group with 'G', both of checkpoint namespace 'self_attention'"),
    ("[+MD-]", 3, "'D' in a group with '+', both of checkpoint namespace 'self_attention'"),
    ("[-E]", 2, "'E' in a group with '-', both of checkpoint namespace 'mlp'"),
    ("E/[-M-]", 5, "'-' in a group with '-', both of checkpoint namespace 'mlp'"),
    # places of pipes and slashes
    ("[*-|*E]", 3, '"|" inside a group'),
    ("[|E]", 1, '"|" inside a group'),
    ("[*/E]", 2, '"/" inside a group'),
    ("*/[*/E]", 4, '"/" inside a group'),
    ("M/M|M", 3, '"|" in an MTP part'),
    ("M/|", 2, '"|" in an MTP part'),
    # attention of two kinds
    *((f"M*{symbol}", 2, f"'{symbol}' ({SYMBOLS[symbol]}) in one model with '*' (attention)") for symbol in LATENT),
    *((f"{symbol}E*", 2, f"'*' (attention) in one model with '{symbol}' ({SYMBOLS[symbol]})") for symbol in LATENT),
    ("[*E]|[+E]", 6, "'+' (latent attention) in one model with '*'"),
    ("M*/D", 3, "'D' (sparse latent attention) in one model with '*'"),
    ("/*D", 2, "'D' (sparse latent attention) in one model with '*'"),
    # MTP parts that differ
    ("M*M*/MM/M*", 9, "an MTP part that is not like the first, 'MM'"),
    ("M/MM/MM/M", 9, "an MTP part that is not like the first, 'MM'"),
    ("M/M/MM", 5, "an MTP part that is not like the first, 'M'"),
    ("M/[*E]/*E", 7, "an MTP part that is not like the first, '[*E]'"),
    ("M/M/", 4, "an MTP part that is not like the first, 'M'"),
    ("M//M", 3, "an MTP part that is not like the first, ''"),
    # no layer
    *((text, 0, "an empty pattern") for text in ("", "|", "||", "/", "//", "|/")),
]


@pytest.mark.parametrize("text", PARSED)
def test_parse(text: str) -> None:
    assert parse(text) == PARSED[text]
    assert str(PARSED[text]) == text


@pytest.mark.parametrize(("text", "trunk", "part", "depths"), MEGATRON)
def test_patterns_of_megatron(text: str, trunk: str, part: str | None, depths: int) -> None:
    pattern = parse(text)
    assert (pattern.symbols, pattern.mtp and str(pattern.mtp), pattern.depths) == (trunk, part, depths)
    assert str(pattern) == text


@pytest.mark.parametrize(("text", "position", "message"), REFUSED)
def test_errors_point_at_the_place(text: str, position: int, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    head, shown, caret = str(error.value).split("\n")
    assert message in head
    assert shown == f"  {text}"
    assert caret == "  " + " " * position + "^"


@pytest.mark.parametrize(
    ("text", "shown", "position"),
    [
        ("*\nE", "*?E", 1),
        ("M\t", "M?", 1),
        ("日E", "?E", 0),
        ("*\u2013", "*\u2013", 1),
        ("E\u0301", "E?", 1),
        ("\ud800", "?", 0),
    ],
)
def test_what_is_shown_has_a_column_for_each_character(text: str, shown: str, position: int) -> None:
    """What breaks lines, or is wide or of no width, is shown as a question mark; the message has its code."""
    with pytest.raises(ValueError) as error:
        parse(text)
    assert str(error.value).split("\n")[1:] == [f"  {shown}", "  " + " " * position + "^"]
    assert f"unknown symbol {text[position]!r}" in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "X"])
def test_errors_name_the_symbols(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    assert all(f"{symbol} ({name})" in str(error.value) for symbol, name in SYMBOLS.items())


@pytest.mark.parametrize("given", [None, 5, b"*E", ["*", "E"], Pattern("*")], ids=repr)
def test_what_is_no_string(given: Any) -> None:
    with pytest.raises(ValueError, match=rf"expected a str such as .*, got {type(given).__name__} "):
        parse(given)


def test_symbols_are_those_of_megatron() -> None:
    assert set(SYMBOLS) == set(NAMESPACES) == set("MG*D+-ECHW")
    assert set(LATENT) == set("+DCHW")
    members = {name: {symbol for symbol in SYMBOLS if NAMESPACES[symbol] == name} for name in NAMESPACES.values()}
    assert members == {"mixer": {*"M"}, "self_attention": {*"G*DCH+W"}, "mlp": {*"-E"}}


# --- counts and pipeline segments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "logical"),
    [("*-E", "012"), ("[*-]E", "001"), ("M[M*]-", "0112"), ("[M*E][*-]G", "000112"), ("[*]E|[G-]", "0122"), ("/*", "")],
)
def test_logical_layers(text: str, logical: str) -> None:
    """A group is one, and so is each layer outside groups."""
    pattern = parse(text)
    assert "".join(map(str, pattern.logical)) == logical
    assert (pattern.physical_count, pattern.logical_count) == (len(logical), len(set(logical)))


@pytest.mark.parametrize(
    ("text", "index", "expected"),
    [
        ("[*-][*-]|[*E][*E]", 0, Segment(parse("[*-][*-]"), 0, 0)),
        ("[*-][*-]|[*E][*E]", 1, Segment(parse("[*E][*E]"), 4, 2)),
        ("[M*E]|M-", 1, Segment(parse("M-"), 3, 1)),
        ("MM|M*|M-|ME", 3, Segment(parse("ME"), 6, 6)),
        ("MMM|M|MMMMM", 2, Segment(parse("MMMMM"), 4, 4)),
        ("||M*", 0, Segment(Pattern(""), 0, 0)),
        ("||M*", 2, Segment(parse("M*"), 0, 0)),
        ("[*E]||G", 1, Segment(Pattern(""), 2, 1)),
        ("[*E]|", 1, Segment(Pattern(""), 2, 1)),
        ("[*E]G|[*-]/[*E]/[*E]", 0, Segment(parse("[*E]G"), 0, 0)),
        ("[*E]G|[*-]/[*E]/[*E]", 1, Segment(parse("[*-]/[*E]/[*E]"), 3, 2)),
        ("[*E]|/[*E]", 1, Segment(parse("/[*E]"), 2, 1)),
    ],
)
def test_segments(text: str, index: int, expected: Segment) -> None:
    pattern = parse(text)
    assert pattern.segments[index] == expected
    assert pattern.segment(index, len(pattern.segments)) == expected


def test_segment_of_a_virtual_stage() -> None:
    """Microbatches pass all ranks before the next virtual stage."""
    pattern = parse("[*-]|G|[*E]M|*/M")
    held = {(pp, vp): str(pattern.segment(pp, 2, vp, 2).pattern) for pp in range(2) for vp in range(2)}
    assert held == {(0, 0): "[*-]", (1, 0): "G", (0, 1): "[*E]M", (1, 1): "*/M"}
    last = pattern.segment(1, 2, 1, 2)
    assert (last.physical_offset, last.logical_offset) == (6, 4)


@pytest.mark.parametrize(
    ("text", "asked", "message"),
    [
        ("M|*", (0, 1), r"'M\|\*' has 2 pipeline segments, expected pp_size \* vp_size = 1 \* 1 = 1"),
        ("M|M|M", (0, 2, 0, 2), r"has 3 pipeline segments, expected pp_size \* vp_size = 2 \* 2 = 4"),
        ("M*", (0, 2), r"has 1 pipeline segments, expected pp_size \* vp_size = 2 \* 1 = 2; write a '\|'"),
        ("M|*", (2, 2), r"pp_rank is 2, expected 0 to pp_size - 1; pp_size is 2"),
        ("M|*", (-1, 2), "pp_rank is -1"),
        ("M|*", (0, 1, 2, 2), r"vp_stage is 2, expected 0 to vp_size - 1; vp_size is 2"),
        ("M|*", (0, 0), "pp_size is 0"),
    ],
)
def test_segments_that_there_are_not(text: str, asked: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text).segment(*asked)


# --- where patterns are given ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbol", "DCHW")
@pytest.mark.parametrize("text", ["M{}E", "ME/{}"])
def test_layers_that_the_reference_model_has_not(symbol: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"has {SYMBOLS[symbol]}, expected any of \* \+ M G - E; the reference model"):
        HybridModel(text.format(symbol), dim=16)


@pytest.mark.parametrize("text", ["[**E]", "*|+", "M/M/*", "M]"])
def test_a_config_is_checked_when_it_is_built(text: str) -> None:
    with pytest.raises(fxo.ConfigError) as error:
        fxo.OverlapConfig(text)
    assert str(error.value).startswith(f"OverlapConfig.pattern is {text!r}: layer pattern: ")
    assert str(error.value).endswith("^")


def test_a_config_takes_all_symbols() -> None:
    """A user's model may have any layers."""
    assert fxo.OverlapConfig("[MDE]|[C-]HW/[+E]/[+E]").pattern == "[MDE]|[C-]HW/[+E]/[+E]"


# --- the documentation -----------------------------------------------------------------------------------------------

DOCS = (Path(__file__).parent.parent / "docs" / "patterns.md").read_text()


def test_the_symbols_of_the_documentation() -> None:
    rows = re.findall(r"^\| `(.)` \| (.+) \| `(\w+)` \|$", DOCS, re.MULTILINE)
    assert {symbol: namespace for symbol, _, namespace in rows} == NAMESPACES
    assert all(name.startswith(SYMBOLS[symbol]) for symbol, name, _ in rows)


def test_the_example_of_the_documentation() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    exec(block, {})


def test_the_refusals_of_the_documentation() -> None:
    rows = re.findall(r"^\| .+ \| ([^|]*`(?:[^|]|\\\|)*) \| .+ \|$", DOCS.partition("| refused |")[2], re.MULTILINE)
    texts = [text.replace("\\|", "|") for row in rows for text in re.findall("`([^`]+)`", row)]
    assert len(rows) == 11 and len(texts) == 17
    for text in texts:
        with pytest.raises(ValueError, match=r"\^$"):
            parse(text)
    shown = DOCS.partition("```text\nlayer pattern: ")[2].partition("\n```")[0]
    with pytest.raises(ValueError) as error:
        parse(shown.split("\n")[1].strip())
    assert str(error.value) == f"layer pattern: {shown}"
