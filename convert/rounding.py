"""What rounding cost each expert of a pack: the sidecar `rounding.json`, and the experts that lose much.

The figures are measured while an expert is quantized, on tokens that do not calibrate it (`calib.quantize.guard`). They
wait as notes in the conversion's journal, so that a killed conversion does not lose them, and become the sidecar when
the pack is complete. Thresholds do not change them: all neurons run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from moe_pack.calib.quantize import ExpertLoss
from moe_pack.formats import ConversionError, Pack, PackError
from moe_pack.formats.base import json_files
from moe_pack.formats.pack.manifests import root_without_thresholds
from moe_pack.formats.pack.sidecar import read_sidecar

ROUNDING_FILE = "rounding.json"
# An expert loses much if the error of its output, without what it inherits, is above the first share of the output; or
# above the second, and so many times the median of the experts in the same formats.
_MOST_LOSS, _NOTED_LOSS, _MOST_RATIO = 0.5, 0.1, 4.0
_SHOWN_EXPERTS = 10
_JOURNAL = "conversion.journal"


@dataclass(frozen=True, slots=True)
class ExpertNote:
    """What the journal keeps of an expert next to its bytes: what it loses, and the neurons with two rows, rising."""

    loss: ExpertLoss | None
    repeated: tuple[int, ...]


def note_of(loss: ExpertLoss | None, repeated: tuple[int, ...] = ()) -> bytes:
    """Returns the journal's note of an expert."""
    return json_files.canonical(json_files.dump(ExpertNote(loss, repeated)))


def read_notes(notes: Mapping[tuple[int, int], bytes]) -> dict[tuple[int, int], ExpertNote]:
    """Reads the notes of experts by MoE layer and expert.

    Raises:  ConversionError for a note that is none.
    """
    return {
        place: json_files.load(ExpertNote, json_files.parse(note, _JOURNAL, ConversionError), _JOURNAL, ConversionError)
        for place, note in notes.items()
    }


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding cost the experts of a pack, `[layer][expert]`; None where it was not measured."""

    experts: tuple[tuple[ExpertLoss | None, ...], ...]

    @classmethod
    def of_notes(cls, notes: Mapping[tuple[int, int], ExpertNote], shape: tuple[int, int]) -> "Rounding":
        """Returns the record of a pack with `shape` layers and experts from the notes of some of them."""
        found = {place: note.loss for place, note in notes.items()}
        return cls(tuple(tuple(found.get((layer, e)) for e in range(shape[1])) for layer in range(shape[0])))


def read_rounding(pack: Pack) -> Rounding | None:
    """Reads the sidecar of a pack; None if nothing was measured.

    Raises:  PackError if it is damaged, or of other layers and experts.
    """
    found = read_sidecar(pack.folder, ROUNDING_FILE, Rounding, root_without_thresholds(pack.manifest))
    if found is not None:
        shape = [len(layer) for layer in found.experts]
        expected = [pack.spec.router.num_experts] * len(pack.spec.moe_layers)
        if shape != expected:
            raise PackError(f"{ROUNDING_FILE}: experts of layers {shape}, expected {expected}; convert again")
    return found


@dataclass(frozen=True, slots=True)
class HeavyLoss:
    """An expert that loses much.

    `layer`: of the model.   `usual`: the median of `own_error` over the experts in the same formats.
    """

    layer: int
    expert: int
    loss: ExpertLoss
    usual: float
    is_rotated: bool


def heavy_losses(pack: Pack, rounding: Rounding) -> list[HeavyLoss]:
    """Returns the experts that lose much, the worst first."""
    alike: dict[object, list[float]] = {}
    measured = [
        (layer_idx, e, pack.index.experts[layer_idx][e], loss)
        for layer_idx, layer in enumerate(rounding.experts)
        for e, loss in enumerate(layer)
        if loss is not None
    ]
    for _, _, formats, loss in measured:
        alike.setdefault(formats, []).append(loss.own_error)
    usual = {formats: median(errors) for formats, errors in alike.items()}
    found = [
        HeavyLoss(
            pack.spec.moe_layers[layer_idx],
            e,
            loss,
            usual[formats],
            pack.rotation is not None and pack.rotation.is_rotated(layer_idx),
        )
        for layer_idx, e, formats, loss in measured
        if loss.own_error > _MOST_LOSS or loss.own_error > max(_NOTED_LOSS, _MOST_RATIO * usual[formats])
    ]
    return sorted(found, key=lambda one: (-one.loss.own_error, one.layer, one.expert))


def warning_lines(pack: Pack, rounding: Rounding) -> list[str]:
    """Returns lines about the experts that lose much; none if there is no such expert."""
    found = heavy_losses(pack, rounding)
    if not found:
        return []
    noun, pronoun = ("expert loses", "it") if len(found) == 1 else ("experts lose", "them")
    advice = f"give {pronoun} more bits"
    if not all(one.is_rotated for one in found):
        advice += ", or convert with --rotate on"
    lines = [f"warning: {len(found)} {noun} much of the output; {advice}"]
    for one in found[:_SHOWN_EXPERTS]:
        lines.append(
            f"  layer {one.layer} expert {one.expert}: squared error {one.loss.own_error:.1%} of its output "
            f"({one.usual:.1%} is usual for its formats), median token {one.loss.median_error:.1%}"
        )
    if len(found) > _SHOWN_EXPERTS:
        lines.append(f"  and {len(found) - _SHOWN_EXPERTS} more")
    return lines


def _plain_line(rounding: Rounding) -> str | None:
    """Returns a line on what was rounded plainly, because calibration lost more; None if nothing was."""
    losses = [loss for layer in rounding.experts for loss in layer if loss is not None]
    counts = [
        (sum(loss.plain_gate for loss in losses), "row", "gate"),
        (sum(loss.plain_up for loss in losses), "row", "up"),
        (sum(loss.plain_down for loss in losses), "block", "down"),
    ]
    texts = [f"{number:,} {unit}{'s' if number > 1 else ''} of {matrix}" for number, unit, matrix in counts if number]
    if not texts:
        return None
    number = sum(bool(loss.plain_gate or loss.plain_up or loss.plain_down) for loss in losses)
    experts = f"{number:,} expert{'s' if number > 1 else ''}"
    return f"rounded plainly, because calibration lost more on other tokens: {', '.join(texts)}, in {experts}"


def rounding_lines(pack: Pack, rounding: Rounding | None) -> list[str]:
    """Returns what `inspect` shows: the squared error of experts' outputs by layer, and those that lose much."""
    if rounding is None:
        return ["rounding: not measured"]
    lines = ["rounding, as the squared error of experts' outputs on tokens that did not calibrate them:"]
    for layer, losses in zip(pack.spec.moe_layers, rounding.experts, strict=True):
        measured = [loss for loss in losses if loss is not None]
        errors = {e: loss.relative_error for e, loss in enumerate(losses) if loss is not None}
        if not errors:
            lines.append(f"  layer {layer}: not measured")
            continue
        worst = max(errors, key=lambda e: errors[e])
        inherited = median(loss.inherited_error for loss in measured)
        behind = f"; {inherited:.1%} from earlier layers" if inherited else ""
        lines.append(
            f"  layer {layer}: median {median(errors.values()):.1%}, worst {errors[worst]:.1%} (expert {worst}){behind}"
        )
    if line := _plain_line(rounding):
        lines.append(line)
    return lines + warning_lines(pack, rounding)
