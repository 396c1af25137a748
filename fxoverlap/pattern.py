"""The hybrid layer pattern language of Megatron-Core: which layers a model has, and how they are laid out.

    pattern = trunk ("/" part)*        each part is the layers of one MTP depth; all parts are equal
    trunk   = layers ("|" layers)*     "|" ends a pipeline segment; a segment may be empty
    part    = layers
    layers  = (symbol | group)*
    group   = "[" symbol+ "]"          one logical layer

Rules, beside the grammar:
1. There is a layer somewhere. The trunk may be empty where MTP parts are not; parts that are all empty are no MTP.
2. `E` ends its group: a logical layer has at most one dispatch and one combine.
3. The layers of a group are of different checkpoint namespaces (`NAMESPACES`), as they share one checkpoint index.
4. `*` and `+ D C H W` do not stand in one pattern, trunk and MTP parts together: a model has one positional embedding
   for all its layers, and those of plain and of latent attention differ.

What a layer outside brackets is scheduled with is found in the graph; in the counts here it is a logical layer.

Source: Megatron-LM, `megatron/core/models/hybrid/hybrid_layer_allocation.py` and `layers/utils.py` there, at commit
089b33b8104aa3ddf10d97e601ab03eaf6836ae2; and its tests, `tests/unit_tests/ssm/test_hybrid_layer_allocation.py`. Two
differences: groups may stand in MTP parts, and a pattern without any layer is an error.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NoReturn

SYMBOLS = {
    "*": "attention",
    "+": "latent attention",
    "D": "sparse latent attention",
    "C": "compressed sparse attention",
    "H": "heavily compressed attention",
    "W": "sliding-window attention",
    "M": "Mamba-2",
    "G": "gated delta net",
    "-": "dense MLP",
    "E": "mixture of experts",
}
"""Symbols of layers, with what they stand for."""

LATENT = "+DCHW"
"""The attentions that a model with `*` cannot have."""

NAMESPACES = {"M": "mixer"} | dict.fromkeys("G*DCH+W", "self_attention") | dict.fromkeys("-E", "mlp")
"""The checkpoint namespace of each symbol, in which a group has at most one layer."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern; `str` gives its text back.

    Attributes:
        symbols: one symbol a physical layer of the trunk, all pipeline segments after another.
        groups: half-open ranges of the trunk's physical layers, one a bracket group, in order.
        mtp: symbols and groups of one MTP depth; None without MTP.
        depths: number of MTP depths; 0 without MTP.
        pipes: for each "|" the number of physical layers before it.
        blanks: number of MTP parts of a pattern whose parts are all empty; they are no depths.
    """

    symbols: str
    groups: tuple[tuple[int, int], ...] = ()
    mtp: Pattern | None = None
    depths: int = 0
    pipes: tuple[int, ...] = ()
    blanks: int = 0

    def __str__(self) -> str:
        starts, ends = {start for start, _ in self.groups}, {end for _, end in self.groups}
        trunk = "".join(
            "]" * (i in ends) + "|" * self.pipes.count(i) + "[" * (i in starts) + self.symbols[i : i + 1]
            for i in range(len(self.symbols) + 1)
        )
        return trunk + f"/{self.mtp}" * self.depths + "/" * self.blanks

    @property
    def logical(self) -> tuple[int, ...]:
        """The logical layer of each physical layer of the trunk; one outside brackets is a logical layer of its own.

        It is the layer's index in a checkpoint.
        """
        inside = {i for start, end in self.groups for i in range(start + 1, end)}
        found: list[int] = []
        for i in range(len(self.symbols)):
            found.append(found[-1] + (i not in inside) if found else 0)
        return tuple(found)

    @property
    def physical_count(self) -> int:
        """Number of physical layers of the trunk."""
        return len(self.symbols)

    @property
    def logical_count(self) -> int:
        """Number of logical layers of the trunk, with one for each layer outside brackets."""
        return len(self.symbols) - sum(end - start - 1 for start, end in self.groups)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The pipeline segments, in the order in which a microbatch runs through them; MTP belongs to the last."""
        found: list[Segment] = []
        physical = logical = 0
        for start, end in pairwise((0, *self.pipes, len(self.symbols))):
            groups = tuple((a - start, b - start) for a, b in self.groups if start <= a < end)
            own = Pattern(self.symbols[start:end], groups)
            if len(found) == len(self.pipes):
                own = replace(own, mtp=self.mtp, depths=self.depths, blanks=self.blanks)
            found.append(Segment(own, physical, logical))
            physical += own.physical_count
            logical += own.logical_count
        return tuple(found)

    def segment(self, pp_rank: int, pp_size: int, vp_stage: int = 0, vp_size: int = 1) -> Segment:
        """The segment of a virtual stage of a pipeline rank: number `vp_stage * pp_size + pp_rank`.

        Raises:
            ValueError: a rank or stage is out of range, or the number of segments is not `pp_size * vp_size`.
        """
        for name, index, size in (("pp_rank", pp_rank, pp_size), ("vp_stage", vp_stage, vp_size)):
            if not 0 <= index < size:
                raise ValueError(
                    f"layer pattern '{self}': {name} is {index}, expected 0 to {name[:2]}_size - 1; "
                    f"{name[:2]}_size is {size}"
                )
        if len(self.pipes) + 1 != pp_size * vp_size:
            raise ValueError(
                f"layer pattern '{self}' has {len(self.pipes) + 1} pipeline segments, expected pp_size * vp_size = "
                f"{pp_size} * {vp_size} = {pp_size * vp_size}; write a '|' between one segment and the next"
            )
        return self.segments[vp_stage * pp_size + pp_rank]


@dataclass(frozen=True, slots=True)
class Segment:
    """What one virtual stage of one pipeline rank holds.

    Attributes:
        pattern: its layers, without pipes; with MTP if it is the last segment.
        physical_offset: number of physical layers in the segments before it, for layer numbers.
        logical_offset: number of logical layers in the segments before it, for checkpoint indices.
    """

    pattern: Pattern
    physical_offset: int
    logical_offset: int


def parse(text: str) -> Pattern:
    """Parse a layer pattern such as `"[*E][*-]|*E/[*E]"`.

    Raises:
        ValueError: the text is not a string, or not a pattern. The message then shows the place, and what to write.
    """
    if not isinstance(text, str):
        raise ValueError(f"layer pattern: expected a str such as '[*E][*-]', got {type(text).__name__} {text!r}")
    trunk, *parts = text.split("/")
    pattern = _layers(text, 0, len(trunk))
    begin = len(trunk) + 1
    depths: list[Pattern] = []
    for part in parts:
        depths.append(_layers(text, begin, begin + len(part), in_mtp=True))
        if part != parts[0]:
            _fail(
                text,
                begin + _common(part, parts[0]),
                f"an MTP part that is not like the first, {parts[0]!r}; every depth has the same layers",
            )
        begin += len(part) + 1
    if not pattern.symbols and not any(parts):
        _fail(text, 0, f"an empty pattern; give at least one of {_allowed()}")
    _check_attention(text)
    if not any(parts):
        return replace(pattern, blanks=len(parts))
    return replace(pattern, mtp=depths[0], depths=len(depths))


def _layers(text: str, begin: int, end: int, in_mtp: bool = False) -> Pattern:
    """Parse the layers of `text[begin:end]`, which a "/" or the end of the text follows."""
    symbols = ""
    groups: list[tuple[int, int]] = []
    pipes: list[int] = []
    start = 0  # first symbol of the open group
    opened = -1  # position of its "[", or -1
    for position in range(begin, end):
        symbol = text[position]
        if symbol == "[":
            if opened >= 0:
                _fail(text, position, 'a group inside a group; close the outer one with "]" first')
            opened, start = position, len(symbols)
        elif symbol == "]":
            if opened < 0:
                _fail(text, position, '"]" without a "[" before it; open the group or leave the bracket out')
            if start == len(symbols):
                _fail(text, opened, f"an empty group; put at least one of {_allowed()} between the brackets")
            groups.append((start, len(symbols)))
            opened = -1
        elif symbol == "|":
            if opened >= 0:
                _fail(text, position, '"|" inside a group, which cannot lie in two pipeline segments; close it first')
            if in_mtp:
                _fail(text, position, '"|" in an MTP part; MTP belongs to the last pipeline segment, leave it out')
            pipes.append(len(symbols))
        elif symbol not in SYMBOLS:
            _fail(text, position, f"unknown symbol {symbol!r}; allowed are {_allowed()}, brackets, | and /")
        else:
            if opened >= 0:
                _check_member(text, position, symbols[start:])
            symbols += symbol
    if opened >= 0 and end < len(text):
        _fail(text, end, '"/" inside a group, which cannot lie in trunk and MTP, or in two depths; close it first')
    if opened >= 0:
        _fail(text, opened, '"[" without a "]" after it; close the group or leave the bracket out')
    return Pattern(symbols, tuple(groups), pipes=tuple(pipes))


def _check_member(text: str, position: int, group: str) -> None:
    """Raise ValueError if the symbol at a position cannot stand in a group behind the layers before it."""
    if group.endswith("E"):
        _fail(text, position, "a layer after E in a group; E must be the last one, close the group before this")
    namespace = NAMESPACES[text[position]]
    for other in group:
        if NAMESPACES[other] == namespace:
            _fail(
                text,
                position,
                f"{text[position]!r} in a group with {other!r}, both of checkpoint namespace {namespace!r}; a group "
                f"has at most one layer of each, end it before this, or leave the brackets out",
            )


def _check_attention(text: str) -> None:
    """Raise ValueError if a pattern has plain and latent attention."""
    plain, latent = text.find("*"), min((i for i, symbol in enumerate(text) if symbol in LATENT), default=-1)
    if plain >= 0 and latent >= 0:
        first, second = sorted((plain, latent))
        _fail(
            text,
            second,
            f"{text[second]!r} ({SYMBOLS[text[second]]}) in one model with {text[first]!r} "
            f"({SYMBOLS[text[first]]}); use '*' or any of {', '.join(LATENT)}, in the trunk and in MTP alike",
        )


def _common(a: str, b: str) -> int:
    """How many characters two texts have in common before they differ, or before one ends."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _allowed() -> str:
    return ", ".join(f"{symbol} ({name})" for symbol, name in SYMBOLS.items())


def _fail(text: str, position: int, message: str) -> NoReturn:
    shown = "".join(map(_one_column, text))
    raise ValueError(f"layer pattern: {message}\n  {shown}\n  {' ' * position}^")


def _one_column(character: str) -> str:
    """The character if it is printed one column wide, else `?`, so that what stands under a text stays in place."""
    is_wide = unicodedata.east_asian_width(character) in "WF" or unicodedata.category(character).startswith("M")
    return character if character.isprintable() and not is_wide else "?"
