"""What experts of a real model lose at given bits, by the error of their outputs: ours, HQQ's and llama.cpp's types.

    python tests/bench/real_experts.py --experts FILE.safetensors --llama-python PYTHON
    python tests/bench/real_experts.py --experts FILE.safetensors --steps

Models trained for tests have no outliers; real ones have single weights hundreds of times as large as the rest, and
tokens whose outputs are hundreds of times the median's. Ours are calibrated trellises in rotated coordinates, as
`convert --rotate on` stores them, except that a file of experts has no hidden states: all tokens count alike. HQQ has
groups of 64; llama.cpp's types have an importance matrix. All are made from the `calibration` inputs and judged on the
`test` inputs. The error is `sum |y - y'|^2 / sum |y|^2` over these tokens, in which the tokens with the largest outputs
count most; next to it stands the median of the tokens' own `|y - y'|^2 / |y|^2`. Bits a weight are all bytes of an
expert. Each type is compared with our largest format of at most its bits; exits with 1 if ours is not lower than one of
at least our least bits, in any layer.

With `--steps`, our formats with single steps of the quantizer on and off, at 2 and 3 bits.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import click
import torch
from benchlib import figure, finish, json_option, table
from benchlib.llama import LlamaExperts, libggml_option, llama_option, llama_types
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from moe_pack.calib.quantize import (
    BLOCK_NEURONS,
    UNROTATED,
    Calibration,
    ExpertQuantizer,
    ExpertTokens,
    GuardedQuantizer,
    LayerRotation,
    RowQuantizer,
    measured_rotation,
    repeats_between,
    rotation_vectors,
    usual_repeats,
)
from moe_pack.formats import ROW_GROUP, ExpertFormat, Matrix, NeuronFunction, PartFormat, part_format, trellis_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.published import published_config
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.formats.pack.plans import format_text
from moe_pack.formats.parts.specs import with_repeats
from moe_pack.runtime.model import NeuronBlock, activations

_TENSORS = ("gate", "up", "down", "calibration", "test")
_MATRICES: tuple[Matrix, ...] = ("gate", "up", "down")
_FUNCTION: NeuronFunction = "silu"
_BITS = (2.0, 2.5, 3.0, 3.5, 4.0)
_STEP_BITS = (2.0, 3.0)
_HQQ_WIDTHS, _HQQ_GROUP = (2, 3, 4), 64


@dataclass(frozen=True, slots=True, eq=False)
class RealExpert:
    """An expert, the inputs to calibrate it on and those to judge it on, float32 [n, d] each."""

    layer: int
    weights: NeuronBlock
    calibration: Tensor
    test: Tensor


def read_experts(path: Path) -> list[RealExpert]:
    """Reads the experts of a file, by layer."""
    tensors = {name: tensor.to(torch.float32) for name, tensor in load_file(path).items()}
    layers = sorted(int(name.removeprefix("layer-").removesuffix(".gate")) for name in tensors if ".gate" in name)
    missing = {f"layer-{layer}.{name}" for layer in layers for name in _TENSORS} - set(tensors)
    if missing or not layers:
        raise click.ClickException(f"{path}: {', '.join(sorted(missing)) or 'layer-N.gate'} is missing")
    found = [[tensors[f"layer-{layer}.{name}"] for name in _TENSORS] for layer in layers]
    if len({tuple(gate.shape for gate in one[:3]) for one in found}) != 1:
        raise click.ClickException(f"{path}: expected experts of one shape")
    return [RealExpert(layer, NeuronBlock(*one[:3]), *one[3:]) for layer, one in zip(layers, found, strict=True)]


def write_checkpoint(experts: list[RealExpert], folder: Path) -> None:
    """Writes a model whose layers have one of the experts each: what measures rotations reads checkpoints."""
    num_neurons, hidden_size = experts[0].weights.up.shape
    vocab, head_dim = 64, 64
    config = published_config("mixtral-8x7b") | {
        "hidden_size": hidden_size,
        "intermediate_size": num_neurons,
        "num_hidden_layers": len(experts),
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "vocab_size": vocab,
    }
    tensors = {
        "model.embed_tokens.weight": torch.ones(vocab, hidden_size),
        "lm_head.weight": torch.ones(vocab, hidden_size),
    }
    tensors["model.norm.weight"] = torch.ones(hidden_size)
    for layer, expert in enumerate(experts):
        place = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}{name}.weight"] = torch.ones(hidden_size)
        for name in ("q", "k", "v"):
            tensors[f"{place}self_attn.{name}_proj.weight"] = torch.ones(head_dim, hidden_size)
        tensors[f"{place}self_attn.o_proj.weight"] = torch.ones(hidden_size, head_dim)
        tensors[f"{place}block_sparse_moe.gate.weight"] = torch.ones(1, hidden_size)
        place += "block_sparse_moe.experts.0."
        assert expert.weights.gate is not None, "a file has gates"
        tensors[f"{place}w1.weight"], tensors[f"{place}w3.weight"] = expert.weights.gate, expert.weights.up
        tensors[f"{place}w2.weight"] = expert.weights.down.T.contiguous()
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


# --- errors

Coordinates = Literal["source", "signs", "scales"]


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of our quantizer. All of them are what `convert` does, but for its measure of tokens.

    `coordinates`: the source's, rotated with random signs, or rotated with outputs scaled by channel.   `calibrated`:
    with the Hessians of the inputs.   `guarded`: each rounding is judged on an eighth of the tokens, and calibrated on
    the others.   `repeated`: 1 of 128 neurons has two rows.   `measured`: the squared error at a token counts as the
    inverse of what its output and the median output have as squares; `convert` has the norm of the hidden state after
    the layer instead.
    """

    coordinates: Coordinates = "scales"
    calibrated: bool = True
    guarded: bool = True
    repeated: bool = True
    measured: bool = False


_ONCE = Steps(repeated=False)
STEPS = {
    "plain rounding": Steps("source", calibrated=False),
    "calibrated": replace(_ONCE, coordinates="source", guarded=False),
    "calibrated, guarded": replace(_ONCE, coordinates="source"),
    "calibrated, guarded, repeated neurons": Steps("source"),
    "rotated": Steps("signs", calibrated=False),
    "rotated, output scales": Steps("scales", calibrated=False),
    "rotated, calibrated": replace(_ONCE, coordinates="signs", guarded=False),
    "rotated, output scales, calibrated": replace(_ONCE, guarded=False),
    "rotated, output scales, calibrated, guarded": _ONCE,
    "all": Steps(),
    "all, tokens measured": Steps(measured=True),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """The error of an expert's outputs; `our_bits`, `our_error`: of ours within its bits, None if it is ours."""

    layer: int
    stored_as: str
    bits: float
    error: float
    median: float
    is_ours: bool
    our_bits: float | None = None
    our_error: float | None = None

    def fault(self) -> str | None:
        """Returns what is not as it should be, or None."""
        if self.our_error is None or self.our_error < self.error:
            return None
        ours = f"ours of {self.our_bits:.2f} bits {self.our_error:.5f}"
        return f"layer {self.layer}, {self.stored_as}: {self.error:.5f}, {ours}"


def output(weights: NeuronBlock, x: Tensor) -> Tensor:
    """Returns an expert's outputs, float32 [n, d], for inputs float32 [n, d]."""
    return activations(x, weights, _FUNCTION).h @ weights.down


def errors(y: Tensor, expected: Tensor) -> tuple[float, float]:
    """Returns the squared error over the squares of all tokens, and the median of the same of single tokens."""
    wrong, squares = (values.square().sum(dim=1).to(torch.float64) for values in (y - expected, expected))
    return float(wrong.sum() / squares.sum()), float((wrong / squares).median())


def stored_bits(part: PartFormat, checkpoint: Checkpoint, repeats: int = 0) -> float:
    """Returns the bits a weight of an expert whose matrices all have one format, without a selector."""
    spec = with_repeats(checkpoint.spec, repeats)
    layout = expert_layout(ExpertFormat(part, part, part), "none", spec.expert, spec.hidden_size)
    return 8 * layout.num_bytes / (len(_MATRICES) * spec.expert.source_size * spec.hidden_size)


def in_rotated(weights: NeuronBlock, rotation: LayerRotation) -> NeuronBlock:
    """Returns the rows of an expert as a layer with this rotation stores them."""
    assert weights.gate is not None, "a file has gates"
    return NeuronBlock(
        rotation.rows("gate", weights.gate), rotation.rows("up", weights.up), rotation.rows("down", weights.down)
    )


def token_weights(expert: RealExpert, measured: bool) -> Tensor:
    """Returns how much a squared error counts at each token to calibrate on, float32 [n]."""
    if not measured:
        return torch.ones(len(expert.calibration))
    squares = output(expert.weights, expert.calibration).square().sum(dim=1)
    return 1 / (squares + squares.median())


def plainly_rounded(weights: NeuronBlock, quantizer: RowQuantizer, part: PartFormat) -> NeuronBlock:
    """Returns an expert as a reader finds it if every row is quantized by its weights alone."""
    d = weights.up.shape[1]
    rows = (weights.gate, weights.up, weights.down)
    return NeuronBlock(*(decode_part(part, d, quantizer.encode(matrix)) for matrix in rows if matrix is not None))


def calibrated(
    weights: NeuronBlock, tokens: ExpertTokens, part: PartFormat, guarded: bool, repeats: int
) -> NeuronBlock:
    """Returns an expert as a reader finds it if it is calibrated on tokens in the coordinates of its rows."""
    (f, d), found, formats = weights.up.shape, list[NeuronBlock](), ExpertFormat(part, part, part)
    if guarded:
        quantizer: ExpertQuantizer | GuardedQuantizer = GuardedQuantizer(formats, tokens, _FUNCTION)
    else:
        quantizer = ExpertQuantizer(formats, Calibration(tokens, _FUNCTION), d)
    for first in range(0, f, BLOCK_NEURONS):
        piece = slice(first, min(first + BLOCK_NEURONS, f))
        assert weights.gate is not None, "a file has gates"
        block = NeuronBlock(weights.gate[piece], weights.up[piece], weights.down[piece])
        gate, up = (decode_part(part, d, quantizer.rows(matrix, block)) for matrix in ("gate", "up"))
        number = repeats_between(repeats, f, first, piece.stop)
        down = decode_part(part, d, quantizer.rows("down", block, repeats=number))
        again = quantizer.repeated
        found.append(NeuronBlock(torch.cat((gate, gate[again])), torch.cat((up, up[again])), down))
    gates = [block.gate for block in found if block.gate is not None]
    return NeuronBlock(
        torch.cat(gates), torch.cat([block.up for block in found]), torch.cat([block.down for block in found])
    )


class Errors:
    """Measures experts as they are stored in different ways.

    Args:    checkpoint: of the same experts, one a layer (`write_checkpoint`).
    """

    def __init__(self, experts: list[RealExpert], checkpoint: Checkpoint) -> None:
        self.experts, self._checkpoint = experts, checkpoint
        self._vectors: dict[Coordinates, RotationVectors | None] = {
            "source": None,
            "signs": rotation_vectors(checkpoint.spec, "on"),
            "scales": measured_rotation(checkpoint),
        }
        self._expected = [output(expert.weights, expert.test) for expert in experts]

    def ours(self, bits: float, steps: Steps, name: str | None = None) -> Iterator[Loss]:
        """Yields the losses of a trellis of so many bits, by layer."""
        part = trellis_format(round(2 * bits), ROW_GROUP)
        repeats = usual_repeats(self._checkpoint.spec.expert.source_size) if steps.calibrated and steps.repeated else 0
        size, name = stored_bits(part, self._checkpoint, repeats), name or format_text(part)
        for place, expert in enumerate(self.experts):
            rotation = LayerRotation.of(self._vectors[steps.coordinates], place)
            stored = in_rotated(expert.weights, rotation)
            if steps.calibrated:
                tokens = ExpertTokens(rotation.inputs(expert.calibration), token_weights(expert, steps.measured))
                rounded = calibrated(stored, tokens, part, steps.guarded, repeats)
            else:
                rounded = plainly_rounded(stored, RowQuantizer(part, stored.up.shape[1], "nearest"), part)
            yield self._loss(place, name, size, rounded, rotation, is_ours=True)

    def hqq(self, width: int) -> Iterator[Loss]:
        """Yields the losses of HQQ's codes of so many bits, by layer."""
        part = part_format(width, _HQQ_GROUP)
        quantizer = RowQuantizer(part, self._checkpoint.spec.hidden_size, "hqq")
        for place, expert in enumerate(self.experts):
            rounded = plainly_rounded(expert.weights, quantizer, part)
            yield self._loss(place, f"HQQ, {format_text(part)}", stored_bits(part, self._checkpoint), rounded)

    def llama(self, stored: LlamaExperts, kind: str) -> Iterator[Loss]:
        """Yields the losses of one of llama.cpp's types, by layer."""
        num_bytes, blocks = stored.stored_as(kind)
        num_weights = sum(len(_MATRICES) * block.up.numel() for block in blocks)
        for place, rounded in enumerate(blocks):
            yield self._loss(place, kind, 8 * num_bytes / num_weights, rounded)

    def _loss(
        self,
        place: int,
        name: str,
        bits: float,
        rounded: NeuronBlock,
        rotation: LayerRotation = UNROTATED,
        is_ours: bool = False,
    ) -> Loss:
        expert = self.experts[place]
        y = rotation.outputs(output(rounded, rotation.inputs(expert.test)))
        return Loss(expert.layer, name, bits, *errors(y, self._expected[place]), is_ours)


def compared(losses: list[Loss]) -> list[Loss]:
    """Returns losses by layer and size, others with ours of the most bits that are not more than theirs."""
    found = list[Loss]()
    for loss in sorted(losses, key=lambda one: (one.layer, one.bits, not one.is_ours)):
        ours = [one for one in found if one.is_ours and one.layer == loss.layer]
        if not loss.is_ours and ours:
            loss = replace(loss, our_bits=ours[-1].bits, our_error=ours[-1].error)
        found.append(loss)
    return found


def layer_tables(losses: list[Loss]) -> str:
    """Returns a table for each layer."""
    header = ("stored as", "bits a weight", "error", "median token's", "ours within its bits", "ours / its")
    texts = []
    for layer in dict.fromkeys(loss.layer for loss in losses):
        rows = [
            (x.stored_as, f"{x.bits:.3f}", f"{x.error:.5f}", f"{x.median:.4f}", figure(x.our_error, ".5f"),
             figure(None if x.our_error is None else x.our_error / x.error))
            for x in losses
            if x.layer == layer
        ]  # fmt: skip
        texts.append(f"Layer {layer}:\n\n{table(header, rows)}")
    return "\n\n".join(texts)


def steps_table(losses: dict[tuple[float, str], list[Loss]]) -> str:
    """Returns the table of steps: errors of all layers, with the median tokens' in brackets."""
    layers = [loss.layer for loss in next(iter(losses.values()))]
    header = ("bits", "steps", *(f"layer {layer}" for layer in layers))
    rows = [
        (f"{bits:g}", name, *(f"{x.error:.4f} ({x.median:.4f})" for x in of_layers))
        for (bits, name), of_layers in losses.items()
    ]
    return table(header, rows)


def measure_steps(found: Errors) -> dict[tuple[float, str], list[Loss]]:
    """Returns the losses of all layers by bits and steps."""
    cases: Iterable[tuple[float, str]] = [(bits, name) for bits in _STEP_BITS for name in STEPS]
    return {
        (bits, name): list(found.ours(bits, STEPS[name], name))
        for bits, name in tqdm(cases, desc="steps", disable=None)
    }


@click.command(help=__doc__)
@click.option(
    "--experts",
    "path",
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A safetensors file: for each layer N of a model with SwiGLU, `layer-N.gate`, `.up` and `.down` [f, d] (down "
    "transposed), and inputs of these experts, `layer-N.calibration` and `.test` [n, d].",
)
@click.option("--steps", is_flag=True, help="Measure single steps of our quantizer.")
@llama_option
@libggml_option
@json_option
@torch.inference_mode()
def main(path: Path, steps: bool, llama_python: Path | None, libggml: Path | None, as_json: bool) -> None:
    """Measures, prints and judges."""
    experts, losses = read_experts(path), list[Loss]()
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as name:
        folder = Path(name)
        write_checkpoint(experts, folder)
        checkpoint = Checkpoint(folder)
        try:
            found = Errors(experts, checkpoint)
            if steps:
                by_steps = measure_steps(found)
                rows = [
                    {"format_bits": bits, "steps": name} | asdict(x)
                    for (bits, name), xs in by_steps.items()
                    for x in xs
                ]
                finish({"losses": rows}, steps_table(by_steps), as_json)
            for bits in tqdm(_BITS, desc="ours", disable=None):
                losses += found.ours(bits, Steps())
            for width in tqdm(_HQQ_WIDTHS, desc="HQQ", disable=None):
                losses += found.hqq(width)
            if llama_python:
                given = ((expert.weights, expert.calibration) for expert in experts)
                stored = LlamaExperts(given, _FUNCTION, llama_python, libggml, folder)
                f, d = experts[0].weights.up.shape
                for kind in tqdm(llama_types(d, f), desc="llama.cpp", disable=None):
                    losses += found.llama(stored, kind)
        finally:
            checkpoint.close()
    losses = compared(losses)
    finish(
        {"losses": [asdict(x) for x in losses]}, layer_tables(losses), as_json, [x for y in losses if (x := y.fault())]
    )


if __name__ == "__main__":
    main()
