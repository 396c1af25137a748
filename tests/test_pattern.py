"""The layer pattern language: what parses, what str gives back, and where errors point."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxoverlap.pattern import SYMBOLS, Pattern, parse


@pytest.mark.parametrize(
    "text, symbols, groups",
    [
        ("*", "*", ()),
        ("*-E", "*-E", ()),
        ("M+G*-E", "M+G*-E", ()),
        ("[*E]", "*E", ((0, 2),)),
        ("[*E][*-]", "*E*-", ((0, 2), (2, 4))),
        ("*[E]-[-*E]E", "*E--*EE", ((1, 2), (3, 6))),
    ],
)
def test_parse(text: str, symbols: str, groups: tuple[tuple[int, int], ...]) -> None:
    assert parse(text) == Pattern(symbols, groups)
    assert str(parse(text)) == text


layers = st.text("*+MG-", max_size=3)
group = layers.flatmap(lambda head: st.sampled_from(["E", "*", "G"]).map(lambda last: f"[{head}{last}]"))


@given(st.lists(st.one_of(group, st.sampled_from(sorted(SYMBOLS))), min_size=1, max_size=6).map("".join))
def test_str_is_the_text(text: str) -> None:
    pattern = parse(text)
    assert str(pattern) == text
    assert pattern.symbols == text.replace("[", "").replace("]", "")
    assert all(start < end and "E" not in pattern.symbols[start : end - 1] for start, end in pattern.groups)


@pytest.mark.parametrize(
    "text, position, message",
    [
        ("", 0, "an empty pattern"),
        ("*[*E", 1, '"[" without a "]"'),
        ("*E]", 2, '"]" without a "["'),
        ("*E]]", 2, '"]" without a "["'),
        ("*[]", 1, "an empty group"),
        ("[*[E]]", 2, "a group inside a group"),
        ("[*D]", 2, "unknown symbol 'D'"),
        ("* E", 1, "unknown symbol ' '"),
        ("[*E-]", 3, "a layer after E"),
        ("[EE]", 2, "a layer after E"),
    ],
)
def test_errors_point_at_the_place(text: str, position: int, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    head, shown, caret = str(error.value).split("\n")
    assert message in head
    assert shown == f"  {text}"
    assert caret == "  " + " " * position + "^"


@pytest.mark.parametrize("text", ["", "[]", "D"])
def test_errors_name_the_symbols_of_today(text: str) -> None:
    with pytest.raises(ValueError, match=r"\* \(attention\), .*G \(gated delta net\), .*E \(mixture of experts\)"):
        parse(text)
