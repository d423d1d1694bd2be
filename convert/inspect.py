"""What a pack holds, as facts for a table or for JSON: the model, bytes by part, formats by layer and expert."""

from dataclasses import dataclass
from typing import Any

from moe_pack.calib import QUALITY_FILE, Quality
from moe_pack.formats import (
    MATRICES,
    ExpertFormat,
    Matrix,
    Pack,
    cached_values,
    dump,
    format_text,
    num_active_parameters,
    num_parameters,
    read_sidecar,
)
from moe_pack.runtime import PREDICTORS, ROUTING_FILE, Routing


@dataclass(frozen=True, slots=True)
class FormatRun:
    """Consecutive layers and experts stored alike; `num_bytes` is one expert's extent."""

    layers: tuple[int, int]
    experts: tuple[int, int]
    formats: ExpertFormat
    num_bytes: int


def describe(pack: Pack) -> dict[str, Any]:
    """Everything `inspect --json` prints: manifest facts, and format and bytes of each expert, `[layer][expert]`."""
    manifest = pack.manifest
    quality = read_sidecar(pack.folder, QUALITY_FILE, Quality, manifest.root)
    return {
        "format": manifest.format,
        "version": manifest.version,
        "features": list(manifest.features),
        "synthetic": pack.is_synthetic,
        "model": dump(manifest.model),
        "parameters": num_parameters(pack.spec),
        "active_parameters": num_active_parameters(pack.spec),
        "kv_values_per_token": cached_values(pack.spec),
        "selector": manifest.selector,
        "quantizer": manifest.quantizer,
        "made_with": {package.name: package.version for package in manifest.made_with},
        "root": manifest.root,
        "bytes": dump(manifest.totals),
        "experts": [
            [
                {
                    **{matrix: _part(formats, matrix) for matrix in MATRICES},
                    "bytes": pack.layout.experts[layer][expert].num_bytes,
                    "threshold": float(pack.thresholds[layer, expert]),
                }
                for expert, formats in enumerate(experts)
            ]
            for layer, experts in enumerate(pack.index.experts)
        ],
        "dense": {dense.name: dump(dense.format) for dense in manifest.dense},
        "routing": _routing(pack),
        "quality": None if quality is None else dump(quality),
    }


def format_runs(pack: Pack) -> list[FormatRun]:
    """All experts, consecutive ones stored alike taken together, then consecutive layers."""
    runs: list[FormatRun] = []
    for layer, experts in enumerate(pack.index.experts):
        row = _expert_runs(pack, layer, experts)
        before = [run for run in runs if run.layers[1] == layer - 1]
        if [(run.experts, run.formats) for run in before] == [(run.experts, run.formats) for run in row]:
            runs[len(runs) - len(before) :] = [
                FormatRun((run.layers[0], layer), run.experts, run.formats, run.num_bytes) for run in before
            ]
        else:
            runs += row
    return runs


def bits_per_weight(pack: Pack) -> float:
    """Bytes of selectors, records and extra, in bits for each of the experts' weights."""
    spec, totals = pack.spec, pack.manifest.totals
    num_experts = len(spec.moe_layers) * spec.router.num_experts
    num_weights = num_experts * spec.expert.intermediate_size * spec.hidden_size * len(spec.expert.matrices)
    return 8 * (totals.selectors + totals.records + totals.extra) / num_weights


def _expert_runs(pack: Pack, layer: int, experts: tuple[ExpertFormat, ...]) -> list[FormatRun]:
    runs: list[FormatRun] = []
    for expert, formats in enumerate(experts):
        if runs and runs[-1].formats == formats:
            runs[-1] = FormatRun((layer, layer), (runs[-1].experts[0], expert), formats, runs[-1].num_bytes)
        else:
            num_bytes = pack.layout.experts[layer][expert].num_bytes
            runs.append(FormatRun((layer, layer), (expert, expert), formats, num_bytes))
    return runs


def _routing(pack: Pack) -> dict[str, Any] | None:
    """What a profile put beside the pack: the best predictor of each MoE layer and its recall; None where none was."""
    routing = Routing.open(pack)
    if routing is None:
        return None
    judged, layers = routing.judged_layers, range(len(pack.spec.moe_layers))
    return {
        "bytes": (pack.folder / ROUTING_FILE).stat().st_size,
        "held_out_tokens": len(routing.routes),
        "recall": routing.best_recall,
        "predictors": [PREDICTORS[routing.best[l]] if l in judged else None for l in layers],
        "recalls": [float(routing.recalls[l, routing.best[l], 0]) if l in judged else None for l in layers],
    }


def _part(formats: ExpertFormat, matrix: Matrix) -> str | None:
    part = formats.of(matrix)
    return None if part is None else format_text(part)
