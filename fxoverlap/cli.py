"""The command line: `fxoverlap demo | explain | simulate | bench`.

Each command prints for a person, and with `--json PATH` also writes its figures as one JSON object; `-` is standard
output, where the object is the last line. Exit status: 0 done; 1 a check or a rank failed, with one message on standard
error; 2 wrong usage; 130 interrupted; 141 nobody reads standard output any more.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fxoverlap as fxo
from fxoverlap import demo
from fxoverlap.benchmarks import memory, models, overhead, patterns, rates, simulate, transform, two_hosts
from fxoverlap.benchmarks.described import DISPATCHERS, Setup
from fxoverlap.benchmarks.workload import Settings
from fxoverlap.hardware import PRESETS as HARDWARE
from fxoverlap.launch import one_rank_group
from fxoverlap.models.hybrid import SYMBOLS, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, of `sys.argv` unless told otherwise, and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        figures: dict[str, Any] = options.command(options)
    except KeyboardInterrupt:
        print("\ninterrupted: every rank was ended", file=sys.stderr)
        return 130
    except fxo.FxOverlapError as error:
        print(f"\nfxoverlap: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python still has to write at its end
        return 141
    except OSError as error:
        print(f"\nfxoverlap: {error}", file=sys.stderr)
        return 1
    if options.json == "-":
        print(json.dumps(figures), flush=True)
    elif options.json is not None:
        Path(options.json).write_text(json.dumps(figures) + "\n")
    return 0 if figures.get("bitwise_equal", True) else 1


def _parser() -> argparse.ArgumentParser:
    """Build the parser; each command's function is its default for `command`."""
    parser = argparse.ArgumentParser(prog="fxoverlap", description=fxo.__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = _add(commands, "demo", _demo, "train a small model, eager and overlapped side by side")
    _add_pattern(show, "[*E][*E]")
    show.add_argument("--ranks", type=_count, default=2, help="processes that share the experts")
    show.add_argument("--steps", type=_count, default=30, help="optimizer steps")
    show.add_argument("--out", default="fxoverlap-demo", help="folder for the graph dump")

    explain = _add(commands, "explain", _explain, "print the nodes and the plan of a model")
    _add_pattern(explain, "[*E][*E]")
    explain.add_argument("--schedule", default="auto", choices=("auto", "megatron", "sequential"), help="order")
    explain.add_argument("--no-delay-wgrad", action="store_true", help="leave weight gradients where they are")
    _add_recompute(explain)
    tokens = "in each microbatch of the step that is explained"
    explain.add_argument("--tokens", type=_count, nargs="+", default=[64, 64], metavar="N", help=tokens)

    _add_simulate(commands)
    bench = commands.add_parser("bench", help="measure on this machine")
    _add_benches(bench.add_subparsers(required=True, metavar="WHAT"))
    return parser


def _add_simulate(commands: Any) -> None:
    predict = _add(commands, "simulate", _simulate, "predict a step of a large model on machines that are not here")
    which = predict.add_mutually_exclusive_group(required=True)
    which.add_argument("--preset", choices=tuple(models.PRESETS), help="a published model")
    which.add_argument("--model", type=_model, metavar="PATH", help="of a JSON file that describes another")
    predict.add_argument("--hardware", choices=tuple(HARDWARE), default="h100", help="of every rank")
    predict.add_argument("--ep", type=_count, required=True, help="ranks that share the experts")
    predict.add_argument("--microbatches", type=_count, default=8, help="in a step")
    predict.add_argument("--seq", type=_count, default=4096, help="tokens of a microbatch on a rank, one sequence")
    only = "a pipeline stage of so many MoE layers, without embedding, MTP depths and head; left out: the whole model"
    predict.add_argument("--layers", type=_count, help=only)
    ahead = "microbatches whose forward runs before the first backward, as on an early pipeline stage"
    predict.add_argument("--warmup", type=_count, default=1, help=ahead)
    again = "layers whose forward is replayed before their backward: uniform (or nothing), all; block:LAYERS, the first"
    everything = fxo.Recompute("uniform")
    predict.add_argument("--recompute", type=_recompute, nargs="?", const=everything, metavar="METHOD", help=again)
    copies = "how tokens travel: a copy for each of their experts, or one for each node that has some"
    predict.add_argument("--dispatcher", choices=DISPATCHERS, default=DISPATCHERS[0], help=copies)


def _add_benches(benches: Any) -> None:
    two = _add(benches, "two-hosts", _two_hosts, "two ranks joined by a slow link")
    two.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    _add_sizes(two, Settings())
    _add_model_sizes(two, Settings())
    _add_recompute(two)

    sweep = _add(benches, "rates", _rates, "two ranks joined by links of several rates")
    several = ["250mbit", "500mbit", "1gbit", "2gbit", "4gbit"]
    sweep.add_argument("--rates", nargs="+", default=several, metavar="RATE", help="as tc writes them")
    sweep.add_argument("--plot", type=_file, nargs="+", default=[], metavar="PATH", help="files such as rates.svg")
    _add_sizes(sweep, Settings(repeats=3))
    _add_model_sizes(sweep, Settings())

    beside = _add(benches, "patterns", _patterns, "the overlap of several patterns, two ranks joined by a slow link")
    beside.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    several = ["[*E][*E][*E][*E]", "[*E][*E][*E]/[*E]"]
    beside.add_argument("--patterns", type=_pattern, nargs="+", default=several, metavar="PATTERN", help="of layers")
    _add_steps(beside, Settings())
    _add_model_sizes(beside, Settings())

    one = _add(benches, "overhead", _overhead, "one rank, nothing to hide")
    one.add_argument("--hidden", type=_count, nargs="+", default=[256, 64], metavar="WIDTH", help="of the model")
    _add_sizes(one, Settings(repeats=9))

    held = _add(benches, "memory", _memory, "peak live bytes of a step, predicted and measured on two ranks")
    _add_sizes(held, memory.DEFAULT)
    _add_model_sizes(held, memory.DEFAULT)

    depth = _add(benches, "transform", _transform, "time of the transformation itself")
    depth.add_argument("--layers", type=_count, default=16, help="physical layers, [*E] x half of it")


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], dict[str, Any]], about: str) -> Any:
    """Add a command; `commands` is what `add_subparsers` gave, a class that argparse does not export."""
    parser = commands.add_parser(
        name, help=about, description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    about_json = "write the figures as JSON to PATH; - for standard output"
    parser.add_argument("--json", type=_file, metavar="PATH", help=about_json)
    parser.set_defaults(command=run)
    return parser


def _add_pattern(parser: argparse.ArgumentParser, default: str) -> None:
    symbols = ", ".join(f"{symbol} {name}" for symbol, name in SYMBOLS.items())
    about = f"layers: {symbols}; brackets group what is scheduled as one, each / begins a multi-token prediction depth"
    parser.add_argument("--pattern", type=_pattern, default=default, help=about)


def _add_recompute(parser: argparse.ArgumentParser) -> None:
    about = "what the backward computes again: uniform[:LAYERS], block[:LAYERS] or selective:GLOB[,GLOB]; behind it "
    about += ":keep=SLOT[,SLOT] for what is saved of that: dispatch, experts, combine; and :prefetch for replays that "
    about += "begin beside the backward of the layer behind"
    parser.add_argument("--recompute", type=_recompute, metavar="METHOD:WHAT", help=about)


def _add_sizes(parser: argparse.ArgumentParser, default: Settings) -> None:
    _add_pattern(parser, default.pattern)
    _add_steps(parser, default)


def _add_steps(parser: argparse.ArgumentParser, default: Settings) -> None:
    parser.add_argument("--microbatches", type=_count, default=default.microbatches, help="in a step")
    parser.add_argument("--tokens", type=_count, default=default.tokens, help="in a microbatch")
    parser.add_argument("--repeats", type=_count, default=default.repeats, help="of each whole step")


def _add_model_sizes(parser: argparse.ArgumentParser, default: Settings) -> None:
    parser.add_argument("--hidden", dest="dim", type=_count, default=default.dim, help="width of the model")
    parser.add_argument("--experts", type=_count, default=default.experts, help="of a layer, on both ranks")
    parser.add_argument("--expert-dim", type=_count, default=default.expert_dim, help="inner width of an expert")
    parser.add_argument("--top-k", type=_count, default=default.top_k, help="experts that a token goes to")
    parser.add_argument("--vocab", type=_count, default=default.vocab, help="size of the vocabulary")


def _count(text: str) -> int:
    """Read a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _file(text: str) -> str:
    """Check that a file can be made, before there is anything to write; `-` is standard output."""
    if text != "-" and not os.access(Path(text).absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file in a folder that can be written, got {text}")
    return text


def _model(path: str) -> models.Model:
    """Read the description of a model."""
    try:
        return models.read(path)
    except (fxo.FxOverlapError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _pattern(text: str) -> str:
    """Check a layer pattern."""
    try:
        parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _recompute(text: str) -> fxo.Recompute:
    """Read a recompute method, its number of layers or its modules, and the slots to keep."""
    asked, _, slots = text.removesuffix(":prefetch").partition(":keep=")
    prefetch = text.endswith(":prefetch")
    method, _, what = asked.partition(":")
    keep = tuple(filter(None, slots.split(",")))
    try:
        if method == "selective":
            return fxo.Recompute(method, modules=tuple(filter(None, what.split(","))), keep=keep, prefetch=prefetch)
        return fxo.Recompute(method, num_layers=int(what or 1), keep=keep, prefetch=prefetch)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected such as uniform:1, got {text!r}: {error}") from error


def _demo(options: argparse.Namespace) -> dict[str, Any]:
    return demo.run(demo.Settings(pattern=options.pattern, ranks=options.ranks, steps=options.steps, out=options.out))


def _explain(options: argparse.Namespace) -> dict[str, Any]:
    each = [Settings(pattern=options.pattern, microbatches=1, tokens=tokens, dim=64) for tokens in options.tokens]
    with one_rank_group() as group:
        config = fxo.OverlapConfig(
            options.pattern,
            schedule=options.schedule,
            delay_wgrad=not options.no_delay_wgrad,
            recompute=options.recompute,
        )
        overlapped = fxo.transform(each[0].model(group), config)
        overlapped.step([batch for settings in each for batch in settings.batches(0)])
        golden, report = overlapped.golden(), overlapped.report()
    print(golden)
    print(report)
    return {"pattern": options.pattern, "golden": golden, "report": report.to_dict()}


def _simulate(options: argparse.Namespace) -> dict[str, Any]:
    setup = Setup(options.ep, options.seq, options.layers, options.recompute, options.dispatcher)
    model = options.model or models.PRESETS[options.preset]
    settings = simulate.Settings(model, HARDWARE[options.hardware], setup, options.microbatches, options.warmup)
    figures = simulate.run(settings)
    print(simulate.text(figures))
    return figures


def _two_hosts(options: argparse.Namespace) -> dict[str, Any]:
    figures = two_hosts.run(_settings(options))
    print(two_hosts.text(figures))
    return figures


def _rates(options: argparse.Namespace) -> dict[str, Any]:
    figures = rates.run(options.rates, _settings(options), options.plot)
    print(rates.text(figures))
    return figures


def _patterns(options: argparse.Namespace) -> dict[str, Any]:
    figures = patterns.run(options.patterns, _settings(options))
    print(patterns.text(figures))
    return figures


def _overhead(options: argparse.Namespace) -> dict[str, Any]:
    figures = overhead.run(options.hidden, _settings(options))
    print(overhead.text(figures))
    return figures


def _memory(options: argparse.Namespace) -> dict[str, Any]:
    figures = memory.run(_settings(options))
    print(memory.text(figures))
    return figures


def _transform(options: argparse.Namespace) -> dict[str, Any]:
    figures = transform.run(options.layers)
    print(transform.text(figures))
    return figures


def _settings(options: argparse.Namespace) -> Settings:
    """What a command that measures was told; sizes that it does not take are the standard configuration's."""
    given = vars(options)
    return Settings(**{each.name: given[each.name] for each in dataclasses.fields(Settings) if each.name in given})
