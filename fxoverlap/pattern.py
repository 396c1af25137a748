"""The hybrid layer pattern language: one symbol a physical layer, brackets around the layers of one logical layer.

    pattern = (symbol | "[" symbol+ "]")+
    symbol  = "*" attention | "+" latent attention | "M" Mamba-2 | "G" gated delta net | "-" dense MLP
            | "E" mixture of experts

`E` ends a group: a logical layer has at most one dispatch and one combine. Layers outside brackets are in no group;
where they are cut is found in the graph.
"""

from dataclasses import dataclass
from typing import NoReturn

SYMBOLS = {
    "*": "attention",
    "+": "latent attention",
    "M": "Mamba-2",
    "G": "gated delta net",
    "-": "dense MLP",
    "E": "mixture of experts",
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern; `str` gives its text back.

    Attributes:
        symbols: one symbol a physical layer.
        groups: half-open ranges of physical layers, one a bracket group, in order.
    """

    symbols: str
    groups: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        starts, ends = {start for start, _ in self.groups}, {end for _, end in self.groups}
        return "".join("[" * (i in starts) + symbol + "]" * (i + 1 in ends) for i, symbol in enumerate(self.symbols))


def parse(text: str) -> Pattern:
    """Parse a layer pattern such as `"[*E][*-]*E"`.

    Raises:
        ValueError: the text is not a pattern. The message shows the place and what is allowed there.
    """
    symbols = ""
    groups: list[tuple[int, int]] = []
    start = 0  # first symbol of the open group
    opened = -1  # position of its "[", or -1
    for position, symbol in enumerate(text):
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
        elif symbol not in SYMBOLS:
            _fail(text, position, f"unknown symbol {symbol!r}; allowed are {_allowed()} and brackets")
        elif opened >= 0 and symbols[start:].endswith("E"):
            _fail(text, position, "a layer after E in a group; E must be the last one, close the group before this")
        else:
            symbols += symbol
    if opened >= 0:
        _fail(text, opened, '"[" without a "]" after it; close the group or leave the bracket out')
    if not symbols:
        _fail(text, 0, f"an empty pattern; give at least one of {_allowed()}")
    return Pattern(symbols, tuple(groups))


def _allowed() -> str:
    return ", ".join(f"{symbol} ({name})" for symbol, name in SYMBOLS.items())


def _fail(text: str, position: int, message: str) -> NoReturn:
    raise ValueError(f"layer pattern: {message}\n  {text}\n  {' ' * position}^")
