"""The layer pattern language by property: what the grammar makes comes back, and no other text breaks the parser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from fxoverlap.pattern import LATENT, NAMESPACES, SYMBOLS, Pattern, parse

MEMBERS = {name: [symbol for symbol in SYMBOLS if NAMESPACES[symbol] == name] for name in NAMESPACES.values()}


@st.composite
def groups(draw: st.DrawFn) -> str:
    """At most one layer of each checkpoint namespace, in any order, but for a mixture of experts, which is last."""
    namespaces = draw(st.lists(st.sampled_from(sorted(MEMBERS)), min_size=1, unique=True))
    members = [draw(st.sampled_from(MEMBERS[name])) for name in namespaces]
    return f"[{''.join(sorted(members, key=lambda symbol: symbol == 'E'))}]"


def layers(max_size: int = 5) -> st.SearchStrategy[str]:
    return st.lists(st.one_of(st.sampled_from(sorted(SYMBOLS)), groups()), max_size=max_size).map("".join)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """A text by the grammar: segments, some of them empty, and MTP parts, all equal and maybe all empty."""
    text = "|".join(draw(st.lists(layers(), min_size=1, max_size=4)))
    text += f"/{draw(layers(3))}" * draw(st.integers(0, 4))
    if draw(st.booleans()):
        text = "".join("*" if symbol in LATENT else symbol for symbol in text)
    else:
        text = text.replace("*", draw(st.sampled_from(LATENT)))
    return text if any(symbol in SYMBOLS for symbol in text) else f"M{text}"


@settings(max_examples=200, deadline=None)
@given(patterns())
def test_str_is_the_text(text: str) -> None:
    pattern = parse(text)
    assert str(pattern) == text
    assert parse(str(pattern)) == pattern


@settings(max_examples=200, deadline=None)
@given(patterns())
def test_what_the_parts_say(text: str) -> None:
    """Read off the text: symbols in order, groups that do not overlap, depths that are alike."""
    pattern = parse(text)
    trunk, *parts = text.split("/")
    assert pattern.symbols == "".join(symbol for symbol in trunk if symbol in SYMBOLS)
    assert "".join(f"[{pattern.symbols[start:end]}]" for start, end in pattern.groups) == _bracketed(trunk)
    assert all(end <= start for (_, end), (start, _) in zip(pattern.groups, pattern.groups[1:], strict=False))
    assert [str(pattern.mtp)] * pattern.depths + [""] * pattern.blanks == parts
    assert (pattern.mtp is None) == (pattern.depths == 0)
    assert pattern.pipes == tuple(
        sum(symbol in SYMBOLS for symbol in trunk[:i]) for i, character in enumerate(trunk) if character == "|"
    )


@settings(max_examples=200, deadline=None)
@given(patterns())
def test_offsets_add_up(text: str) -> None:
    """Each segment begins where the one before it ends, by both counts, and together they are the pattern."""
    pattern = parse(text)
    physical = logical = 0
    for each in pattern.segments:
        assert (each.physical_offset, each.logical_offset) == (physical, logical)
        assert len(each.pattern.symbols) == each.pattern.physical_count
        assert each.pattern.logical_count == len(set(each.pattern.logical))
        physical += each.pattern.physical_count
        logical += each.pattern.logical_count
        here = pattern.logical[each.physical_offset : physical]
        assert here == tuple(each.logical_offset + i for i in each.pattern.logical)
    assert (physical, logical) == (pattern.physical_count, pattern.logical_count)
    assert "|".join(str(each.pattern) for each in pattern.segments) == text


@settings(max_examples=200, deadline=None)
@given(patterns(), st.data())
def test_segment_of_each_rank_and_stage(text: str, data: st.DataObject) -> None:
    """However the segments are shared out, every one is somebody's, in the order of stages and then ranks."""
    pattern = parse(text)
    count = len(pattern.segments)
    pp_size = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    vp_size = count // pp_size
    held = [pattern.segment(pp, pp_size, vp, vp_size) for vp in range(vp_size) for pp in range(pp_size)]
    assert tuple(held) == pattern.segments


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text("".join(SYMBOLS) + "[]|/", max_size=12), st.text("*E[]|/", max_size=12), st.text()))
@example("\ud800[")
@example("a\u0301\r\u2028")
def test_any_text_parses_or_is_refused_with_a_place(text: str) -> None:
    try:
        pattern = parse(text)
    except ValueError as error:
        head, shown, caret = str(error).split("\n")
        assert head.startswith("layer pattern: ")
        assert len(shown) == len(text) + 2
        assert caret.strip(" ") == "^" and 2 <= caret.index("^") <= len(text) + 2
    else:
        assert str(pattern) == text


@settings(max_examples=200, deadline=None)
@given(patterns(), st.data())
def test_one_wrong_character_is_pointed_at(text: str, data: st.DataObject) -> None:
    """Whatever else a text says, the first character that is no part of the language is where the error is."""
    at = data.draw(st.integers(0, len(text)))
    wrong = data.draw(st.characters(exclude_characters="".join(SYMBOLS) + "[]|/"))
    try:
        parse(f"{text[:at]}{wrong}{text[at:]}")
    except ValueError as error:
        assert f"unknown symbol {wrong!r}" in str(error)
        assert str(error).split("\n")[-1] == " " * (2 + at) + "^"
    else:
        raise AssertionError("parsed")


WANTED: dict[str, Callable[[Pattern], bool]] = {
    "groups and pipes": lambda p: bool(p.groups) and bool(p.pipes),
    "groups in several depths": lambda p: p.depths > 1 and p.mtp is not None and bool(p.mtp.groups),
    "empty trunk": lambda p: p.symbols == "",
    "empty segment": lambda p: 0 in p.pipes and p.symbols != "",
    "empty parts": lambda p: p.blanks > 0,
    "plain attention": lambda p: "*" in p.symbols,
    "two latent attentions": lambda p: len(set(p.symbols) & set(LATENT)) > 1,
}


@pytest.mark.parametrize("what", WANTED)
def test_the_strategy_makes_all_there_is(what: str) -> None:
    once = settings(derandomize=True, max_examples=1000, phases=[Phase.generate], deadline=None)
    find(patterns(), lambda text: WANTED[what](parse(text)), settings=once)


def _bracketed(text: str) -> str:
    """The groups of a text, without what is between them."""
    return "".join(f"[{piece.split(']')[0]}]" for piece in text.split("[")[1:])
