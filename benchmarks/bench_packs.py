"""The packs that streaming is measured on, and a GGUF beside each; made where they are not there.

Two are synthetic, about 5 GB at 4 bit throughout: few large experts, many small ones. The third is the demo model's.
A GGUF has its pack's routers, embedding, attention and norms, in Q4_0 where the pack has 4 bit, and random experts of
the same size and deviation: tokens go to experts as in the pack, some often, some seldom. Of the experts that 24
random tokens chose in each layer, 91 to 98% were the pack's own choices (llama-cpp-python 0.3.36).
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import torch
from decode_speed import dimensions
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import DenseRole, GroupedQuerySpec, ModelSpec, Pack, dense_roles
from moe_pack.runtime import PackWeights, num_cpus
from moe_pack.runtime.budget import LEAST_PREFILL_TOKENS, divide_budget, expert_pages, workspace_bytes

DEMO = "demo"  # the demo model's pack
_DEMO_MODEL = Path(__file__).parents[1] / "tests" / "models" / "tiny-mixtral"
_PLAN = ("--selector-bits", "4", "--record-bits", "4", "--dense-bits", "4")
_CHARACTER = ("--skew", "0.5", "--path-correlation", "0.5")
_QUANTIZED = "Q4_0"


F = TypeVar("F", bound=Callable[..., Any])


def run_options(folder_holds: str) -> Callable[[F], F]:
    """Adds the options that every measurement on these packs has: --folder, --seed, --json."""
    file = click.Path(path_type=Path, dir_okay=False)

    def add(body: F) -> F:
        body = click.option("--json", "json_file", type=file, help="Write every figure there.")(body)
        body = click.option("--seed", default=0, show_default=True, help="Of the tokens.")(body)
        return click.option(
            "--folder",
            type=click.Path(path_type=Path, file_okay=False),
            default="build/bench-packs",
            show_default=True,
            help=f"For {folder_holds}.",
        )(body)

    return add


threads_option = click.option("--threads", default=num_cpus, show_default="all", type=click.IntRange(1))


@dataclass(frozen=True, slots=True)
class SyntheticPack:
    """Some layers of a published model."""

    model: str
    layers: int
    vocab: int | None = None

    def arguments(self) -> list[str]:
        """What `moe-pack synth` is asked for."""
        vocab = [] if self.vocab is None else ["--vocab", str(self.vocab)]
        return [self.model, "--layers", str(self.layers), *vocab, *_PLAN, *_CHARACTER]


_BOUNDLESS = 1 << 60

SYNTHETIC = {
    "mixtral-6-layers": SyntheticPack("mixtral-8x7b", 6),
    "qwen3-14-layers": SyntheticPack("qwen3-30b-a3b", 14, 32768),
}
# llama.cpp's names of what a decoder layer has, and of the rest.
_LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "router": "ffn_gate_inp",
}
_NAMES = {"embed": "token_embd", "norm": "output_norm", "head": "output"}


def make_pack(name: str, folder: Path) -> Path:
    """The pack of this name in `folder`, made unless it is there; `DEMO` or one of `SYNTHETIC`."""
    pack = folder / name
    if (pack / "manifest.json").exists():
        return pack
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"making {pack}", err=True)
    asked = ["convert", str(_DEMO_MODEL), *_PLAN] if name == DEMO else ["synth", *SYNTHETIC[name].arguments()]
    command = [sys.executable, "-m", "moe_pack.convert.cli", *asked, "-o", str(pack)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return pack


def budget_with(pack: Pack, num_experts: int, context_tokens: int) -> int:
    """The budget that leaves room for so many of the largest experts, and for short forward passes."""
    plan = divide_budget(pack.layout, _BOUNDLESS, context_tokens, 0)
    largest = int(expert_pages(pack.layout, plan.page_bytes).max()) * (plan.page_bytes + plan.head_bytes)
    return plan.dense + plan.cache + workspace_bytes(pack.spec, LEAST_PREFILL_TOKENS) + num_experts * largest


def make_gguf(pack: Path, llama_python: Path) -> Path:
    """A synthetic pack's GGUF, beside it, made unless it is there; the Python has gguf and numpy."""
    path = pack.with_name(f"{pack.name}-{_QUANTIZED}.gguf")
    if path.exists():
        return path
    click.echo(f"making {path}", err=True)
    given = path.with_suffix(".given")
    shutil.rmtree(given, ignore_errors=True)
    given.mkdir()
    try:
        with Pack(pack) as opened:
            weights = PackWeights(opened, torch.device("cpu"))
            _write_given(weights, given)
            deviations = json.dumps(_deviations(weights))
        command = [*llama_command(llama_python, path, opened.spec), "--write-only"]
        command += ["--given", str(given), "--deviations", deviations]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    finally:
        shutil.rmtree(given)
    return path


def llama_command(llama_python: Path, gguf: Path, spec: ModelSpec) -> list[str]:
    """`llama_speed.py` on a GGUF of these dimensions."""
    command = [str(llama_python), str(Path(__file__).with_name("llama_speed.py")), str(gguf)]
    return [*command, "--quantized", _QUANTIZED, "--dimensions", json.dumps(dimensions(spec))]


def _write_given(weights: PackWeights, folder: Path) -> None:
    """Every dense tensor in a file of llama.cpp's name."""
    for role in dense_roles(weights.spec):
        np.save(folder / f"{_llama_name(role)}.npy", _dense(weights, role))


def _llama_name(role: DenseRole) -> str:
    layer, _, name = role.name.removeprefix("layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[name]}.weight" if name else f"{_NAMES[role.name]}.weight"


def _dense(weights: PackWeights, role: DenseRole) -> NDArray[np.floating]:
    if len(role.shape) == 1:
        return weights.vector(role.name).numpy()
    values = weights.matrix(role.name).rows(0, role.shape[0])
    name = role.name.rpartition(".")[2]
    if weights.spec.family == "mixtral" and name in ("q", "k"):
        values = _interleaved(values, weights.spec)
    # float16 is wider than what the matrix was stored in
    return values.half().numpy() if role.quantizable else values.float().numpy()


def _interleaved(rows: Tensor, spec: ModelSpec) -> Tensor:
    """Queries or keys [h * head_dim, d] as llama.cpp rotates them: neighbours, where ours are half a head apart."""
    attention = spec.attention
    assert isinstance(attention, GroupedQuerySpec), "of these families"
    halves = rows.view(-1, 2, attention.head_dim // 2, rows.shape[1])  # [h, half, head_dim / 2, d]
    return halves.transpose(1, 2).reshape(rows.shape)


def _deviations(weights: PackWeights) -> dict[str, float]:
    """Of the weights of experts, by llama.cpp's names: those of the first."""
    blocks = list(weights.expert(0, 0).blocks())
    gates = [block.gate for block in blocks if block.gate is not None]
    matrices = {"gate": gates, "up": [block.up for block in blocks], "down": [block.down for block in blocks]}
    return {f"ffn_{name}_exps": float(torch.cat(parts).std()) for name, parts in matrices.items()}
