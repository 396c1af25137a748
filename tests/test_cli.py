"""The command line: each command in its smallest form, the keys of its JSON, and what it says when it cannot go on."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from two_ranks import TwoRanks

from fxoverlap import Recompute, cli, launch

ROOT = Path(__file__).parent.parent
SMALL = ["--pattern", "E", "--tokens", "16", "--repeats", "1"]


def _figures(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command with `--json -` and read the last line it printed."""
    assert cli.main([*arguments, "--json", "-"]) == 0
    figures: dict[str, Any] = json.loads(capfd.readouterr().out.splitlines()[-1])
    return figures


def test_demo(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["demo", "--steps", "3", "--pattern", "E/E", "--out", str(tmp_path), "--json", "-"]) == 0
    lines = capfd.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    assert set(figures) >= {
        *("bitwise_equal", "ranks", "steps", "loss_first", "loss_last", "eager_ms", "fused_ms", "overlap_pct")
    }
    assert figures["bitwise_equal"] is True
    assert (figures["ranks"], figures["steps"]) == (2, 3)
    assert figures["loss_last"] < figures["loss_first"]
    assert figures["exchanges_a_microbatch"] == 8
    assert sum(line.split()[:1] in (["0"], ["1"], ["2"]) for line in lines) == 3  # a line a step
    assert not any("\r" in line for line in lines)  # a bar on a terminal only
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("fused_graph.txt", "golden.txt", "report.txt", "timeline.json")
    ]
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    assert {"L0.experts.B", "MTP0.experts.B"} <= {event["name"] for event in timeline["traceEvents"]}
    assert f"{tmp_path}/timeline.json" in lines[-2] and figures["timeline"] == f"{tmp_path}/timeline.json"
    assert "profiled step" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("pattern", ["E", "E/E"])
def test_explain(capfd: pytest.CaptureFixture[str], tmp_path: Path, pattern: str) -> None:
    path = tmp_path / "explain.json"
    assert cli.main(["explain", "--pattern", pattern, "--json", str(path)]) == 0
    printed = capfd.readouterr().out
    assert "L0.experts.B" in printed and "L0.dispatch.F" in printed
    assert [depth for depth in range(4) if f"MTP{depth}.experts.B" in printed] == list(range(pattern.count("/")))
    assert json.loads(path.read_text())["golden"] in printed


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("uniform", Recompute("uniform")),
        ("block:2", Recompute("block", 2)),
        ("selective:layers.*.norm,act", Recompute("selective", modules=("layers.*.norm", "act"))),
        ("uniform:keep=dispatch", Recompute("uniform", keep=("dispatch",))),
        ("uniform:2:keep=dispatch,combine", Recompute("uniform", 2, keep=("dispatch", "combine"))),
        ("selective:layers.1:keep=combine", Recompute("selective", modules=("layers.1",), keep=("combine",))),
    ],
)
def test_recompute_as_it_is_typed(text: str, asked: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(cli, "_explain", lambda options: given.append(options.recompute) or {})
    assert cli.main(["explain", "--recompute", text]) == 0
    assert given == [asked]


@pytest.mark.parametrize("text", ["whole", "uniform:x", "uniform:1:keep=counts", "selective"])
def test_recompute_that_is_wrong_is_wrong_usage(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["explain", "--recompute", text])
    assert "expected such as uniform:1" in capfd.readouterr().err


def test_paths_are_looked_at_before_the_work(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["explain", "--json", str(tmp_path / "nowhere" / "x.json")])
    assert "expected a file in a folder that can be written" in capfd.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--steps", "1", "--out", str(tmp_path / "file")]) == 1
    printed, errors = capfd.readouterr()
    assert printed == "" and "file" in errors and "Traceback" not in errors


def test_bench_two_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    figures = _figures(capfd, "bench", "two-hosts", "--microbatches", "3", *SMALL)
    assert set(figures) >= {
        *("shaped", "rate", "microbatches", "bitwise_equal", "eager_ms", "sequential_ms", "fused_ms", "compute_ms"),
        *("comm_ms", "overlap_pct", "overlap_step_pct", "megatron_ms", "auto_ms", "auto_pair_ms", "predicted_ms"),
        "bound_ms",
    }
    assert figures["bitwise_equal"] is True
    assert figures["all_to_alls"] == 3 * 5


def test_bench_patterns(capfd: pytest.CaptureFixture[str]) -> None:
    small = SMALL[2:]  # no --pattern
    figures = _figures(capfd, "bench", "patterns", "--patterns", "E", "E/E", "--microbatches", "3", *small)
    assert list(figures["patterns"]) == ["E", "E/E"]
    for each in figures["patterns"].values():
        assert each["ms"] > 0 and all(0 <= each[name] <= 100 for name in each if name.endswith("_pct"))


def test_bench_overhead(capfd: pytest.CaptureFixture[str]) -> None:
    figures = _figures(capfd, "bench", "overhead", "--microbatches", "2", "--hidden", "32", "16", *SMALL)
    assert set(figures) >= {"eager_ms", "fused_ms"}
    assert [width["hidden"] for width in figures["widths"]] == [32, 16]
    assert figures["bitwise_equal"] is True


def test_bench_memory(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, two_ranks: TwoRanks) -> None:
    # Its twelve models are alike, and ranks of its own would capture each of them.
    def launch(function: Any, ranks: int, *args: Any, timeout_s: float) -> list[Any]:
        return two_ranks.run(function, *args, timeout_s=timeout_s)

    monkeypatch.setattr("fxoverlap.benchmarks.memory.launch", launch)
    sizes = ["--pattern", "[*E][E]", "--microbatches", "3", "--tokens", "64", "--hidden", "16", "--repeats", "2"]
    figures = _figures(capfd, "bench", "memory", *sizes)
    assert figures["bitwise_equal"] is True
    cases = {case["name"]: case for case in figures["cases"]}
    assert list(cases)[:5] == ["eager", "checkpoint", "fused", "fused_no_delay", "early_release"]
    assert cases["checkpoint"]["measured_bytes"] < cases["eager"]["measured_bytes"]
    for name, case in cases.items():
        assert set(case) >= {"name", "predicted_bytes", "measured_bytes"}
        assert (case["predicted_bytes"] is None) == (name in ("eager", "checkpoint"))
        if case["predicted_bytes"] is not None:
            assert abs(case["predicted_bytes"] / case["measured_bytes"] - 1) < 0.05
    assert figures["fused_over_bound"] <= 1.03 and figures["head_start_layers"] >= 1
    recomputed = ["uniform_1", "uniform_2", "block_2", "selective", "uniform_1_keep_dispatch"]
    assert list(cases)[5:10] == recomputed
    assert all(cases[name]["measured_bytes"] < cases["fused"]["measured_bytes"] for name in recomputed)


def test_bench_memory_of_layers_outside_brackets(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "memory", "--pattern", "*[*E]"]) == 1
    assert "expected all layers in brackets" in capfd.readouterr().err
    assert cli.main(["bench", "memory", "--pattern", "[*E]/[*E]"]) == 1
    assert "expected no multi-token prediction" in capfd.readouterr().err


def test_bench_transform(capfd: pytest.CaptureFixture[str]) -> None:
    figures = _figures(capfd, "bench", "transform", "--layers", "2")
    assert set(figures) >= {"layers", "transform_s", "nodes"}
    assert figures["layers"] == 2 and figures["nodes"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--pattern", "[*E"], '"[" without a "]"'),
        (["demo", "--pattern", "[DE]"], "has sparse latent attention, expected any of * + M G - E"),
        (["demo", "--steps", "0"], "expected at least 1, got 0"),
        (["bench"], "WHAT"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted: every rank was ended"),
        (launch.LaunchError("rank 1 of 2 failed", 1), 1, "LaunchError: rank 1 of 2 failed"),
    ],
)
def test_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fxoverlap.demo.launch", fail)
    assert cli.main(["demo"]) == status
    assert said in capsys.readouterr().err


def test_every_package_is_installed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    inside = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "fxoverlap").rglob("__init__.py")}
    beside = {f"fxoverlap.{name}" for name in ("passes", "benchmarks")}
    assert listed == inside | beside
