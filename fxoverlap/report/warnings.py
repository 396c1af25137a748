"""Warnings of a report: what was asked for and has no effect, and globs that match something else than it seems."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

from fxoverlap.config import OverlapConfig
from fxoverlap.ir import ChunkGraph, Instance, JointGraph, Lane, Phase, Plan
from fxoverlap.passes import op_facts
from fxoverlap.passes.layers import globs_of, matches
from fxoverlap.passes.recompute import idle_keeps
from fxoverlap.schedule.policies import early_release_edges


def _releases_early(plan: Plan, config: OverlapConfig) -> bool:
    is_asked = config.schedule in ("auto", "megatron")
    return is_asked and bool(early_release_edges(plan.chunks["F"], plan.chunks["B"]))


def warnings_of(
    chunk: ChunkGraph, plan: Plan, config: OverlapConfig, microbatches: int | None, alone: str | None
) -> tuple[str, ...]:
    """One sentence for each thing that was asked for in vain, and for each name that may not mean what it matches."""
    warnings = _of_layers(chunk, config)
    has_weights = any(node.phase is Phase.W for node in chunk.nodes)
    if config.delay_wgrad and has_weights and count_moved(plan.order) == 0:
        warnings.append("delay_wgrad=True, but the schedule moved no W node: all run right behind their B node.")
    if config.ramp == "pair" and alone is not None:
        warnings.append(f'ramp="pair" has no effect: {alone}.')
    elif config.ramp == "pair" and microbatches == 1:
        warnings.append('ramp="pair", but the last step had one microbatch, which has no partner; give it two or more.')
    if config.early_release and not _releases_early(plan, config):
        warnings.append(
            "early_release=True has no effect: there is no layer whose pre_dispatch.B runs beside experts.F of another "
            "microbatch, or the schedule is sequential or a policy of your own."
        )
    warnings += _of_recompute(chunk, config)
    if not any(node.lane is Lane.COMM for node in chunk.nodes):
        warnings.append("No exchange was found in the model, so there is no communication to hide.")
    return tuple(warnings)


def _of_layers(chunk: ChunkGraph, config: OverlapConfig) -> list[str]:
    warnings = []
    joint = chunk.joint
    physical = joint.physical if joint is not None else ()
    if config.layers != OverlapConfig().layers and not physical:
        warnings.append(
            f"OverlapConfig.layers={config.layers!r} matches no module that the forward runs, so no layer has edges of "
            f"its own. Set it to the FQN glob of the model's layers."
        )
    if config.mtp_layers not in ((), OverlapConfig().mtp_layers) and not chunk.depths:
        warnings.append(
            f"OverlapConfig.mtp_layers={config.mtp_layers!r} matches no module that the forward runs, so there are no "
            f"MTP depths. Set it to the FQN glob of the model's depths, or leave it out."
        )
    if joint is None:
        return warnings
    if physical:
        warnings += _idle_globs("layers", config.layers, [layer.fqn for layer in physical])
    if chunk.depths:
        inside = [layer.fqn for layer in physical if layer.depth is not None]
        warnings += _idle_globs("mtp_layers", config.mtp_layers, inside)
    return [*warnings, *_lists_of_depths(chunk, config), *_parts_of_depths(joint, config)]


def _of_recompute(chunk: ChunkGraph, config: OverlapConfig) -> list[str]:
    if config.recompute is None:
        return []
    replayed = [node for node in chunk.nodes if node.phase is Phase.R]
    if not replayed:
        return ["recompute has no effect: the backward reads nothing that could be computed again."]
    warnings = []
    if config.recompute.prefetch and not any(node.lane is Lane.COMM for node in replayed):
        warnings.append("Recompute.prefetch has no effect: no replay exchanges tokens.")
    if idle := idle_keeps(chunk, config):
        warnings.append(
            f"Recompute.keep names {', '.join(idle)}, which has no effect: no region holds an exchange whose result a "
            f"replay would need from there."
        )
    return warnings


def _idle_globs(field: str, globs: str | Sequence[str], fqns: Sequence[str]) -> list[str]:
    """Of several globs, those that match none of these layers, nor what holds one."""
    if isinstance(globs, str):
        return []
    prefixes = {prefix for fqn in fqns for prefix in accumulate(_parts(fqn), "{}.{}".format)}
    idle = [glob for glob in globs if not any(matches(prefix, glob) for prefix in prefixes)]
    return [
        f"OverlapConfig.{field}={globs!r}, but {glob!r} matches no module that the forward runs, or only parts of what "
        f"another glob matches, so it has no effect. Correct it, or leave it out."
        for glob in idle
    ]


def _lists_of_depths(chunk: ChunkGraph, config: OverlapConfig) -> list[str]:
    """For each depth that is a list, such as `mtp.layers` under `mtp.*`: its items may be meant as depths."""
    assert chunk.joint is not None
    warnings = []
    for depth in range(len(chunk.depths)):
        fqns = [layer.fqn for layer in chunk.joint.physical if layer.depth == depth]
        lists = {_parent(fqn) for fqn in fqns if _parts(fqn)[-1].isdecimal()}
        found = [fqn for fqn in sorted(lists) if not _parts(fqn)[-1].isdecimal() and _is_depth(fqn, config)]
        if found and len(fqns) > 1:
            warnings.append(
                f"OverlapConfig.mtp_layers={config.mtp_layers!r} matches {found[0]}, which makes {', '.join(fqns)} "
                f"the layers of one MTP depth. If each of them is a depth, set mtp_layers={found[0] + '.*'!r}."
            )
    return warnings


def _parts_of_depths(joint: JointGraph, config: OverlapConfig) -> list[str]:
    """For each module that runs and whose named parts are depths, such as `mtp` under `mtp.*`: it may be meant."""
    calls = {call.rpartition("#")[0] for op in op_facts.ops(joint.module.graph) for call in op_facts.tag(op).calls}
    named = [each.fqn for each in joint.physical if each.depth is not None and not _parts(each.fqn)[-1].isdecimal()]
    found = sorted({fqn for fqn in named if _is_depth(fqn, config) and _parent(fqn) in calls})
    return [
        f"OverlapConfig.mtp_layers={config.mtp_layers!r} makes an MTP depth of each of {', '.join(parts)}, which are "
        f"parts of the module {module!r} that runs. If that is one depth, set mtp_layers={module!r}."
        for module, parts in ((module, list(each)) for module, each in groupby(found, _parent))
        if len(parts) > 1
    ]


def _parts(fqn: str) -> list[str]:
    return fqn.split(".")


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _is_depth(fqn: str, config: OverlapConfig) -> bool:
    return any(matches(fqn, glob) for glob in globs_of(config.mtp_layers))


def count_moved(order: Sequence[Instance]) -> int:
    """The W nodes between which and the last node that they read from others than W run."""
    made_at = {(i.mb, value): k for k, i in enumerate(order) for value in i.node.writes}
    moved, last_other = 0, -1
    for position, instance in enumerate(order):
        if instance.node.phase is Phase.W:
            start = max((made_at.get((instance.mb, value), -1) for value in instance.node.reads), default=-1)
            moved += last_other > start
        else:
            last_other = position
    return moved
