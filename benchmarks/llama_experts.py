"""Experts as llama.cpp would store them, importance matrix and all: `llama_quants.py` does it, in a Python of its own.

The importance matrix is llama-imatrix's, by its definition: for each expert and column the mean square of what the
matrix is multiplied with, over the tokens of the calibration text that go to that expert; 1 where no token does.
Matrices lie as llama.cpp has them: gate and up [f, d], down [d, f]. All are of one type.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from expert_inputs import expert_inputs
from memory_weights import MemoryWeights
from torch import Tensor

from moe_pack.calib import Tokens
from moe_pack.formats import ModelSpec
from moe_pack.runtime import NeuronBlock, activations

# Weights a block of those of at most 4.5 bits a weight: rows are made of whole blocks. With Q4_0 and MXFP4, which are
# there for rows that hold no blocks of 256.
_BLOCKS = {
    "IQ1_S": 256,
    "IQ1_M": 256,
    "IQ2_XXS": 256,
    "IQ2_XS": 256,
    "IQ2_S": 256,
    "Q2_K": 256,
    "IQ3_XXS": 256,
    "IQ3_S": 256,
    "Q3_K": 256,
    "IQ4_XS": 256,
    "MXFP4": 32,
    "Q4_0": 32,
    "IQ4_NL": 32,
    "Q4_K": 256,
}


@dataclass(frozen=True, slots=True)
class LlamaPython:
    """What runs llama.cpp's code: a Python with gguf, and the library unless that Python has llama_cpp."""

    python: Path
    libggml: Path | None


@dataclass(frozen=True, slots=True, eq=False)
class LlamaExperts:
    """All experts in one of llama.cpp's types: their bytes, and gate, up and down, float32 [L E, f, d]."""

    num_bytes: int
    matrices: tuple[Tensor, Tensor, Tensor]
    num_experts: int  # a layer's

    def block(self, layer_idx: int, expert: int) -> NeuronBlock:
        """An expert as a decoder takes it."""
        return NeuronBlock(*(matrix[layer_idx * self.num_experts + expert] for matrix in self.matrices))


def llama_types(spec: ModelSpec) -> tuple[str, ...]:
    """The types that can hold this model's rows, by rising size."""
    rows = (spec.hidden_size, spec.expert.intermediate_size)
    return tuple(kind for kind, block in _BLOCKS.items() if not any(columns % block for columns in rows))


@torch.inference_mode()
def write_experts(weights: MemoryWeights, tokens: Tokens, folder: Path) -> None:
    """Writes matrices and importance, as `llama_quants.py` reads them; `weights` with the source's experts."""
    function, f = weights.spec.expert.function, weights.spec.expert.intermediate_size
    seen = {}
    for inputs in expert_inputs(weights, tokens):
        place, x = (inputs.layer_idx, inputs.expert), inputs.x
        h = activations(x, weights.original(*place), function).h
        seen[place] = (
            (x.square().mean(dim=0), h.square().mean(dim=0)) if len(x) else (torch.ones(x.shape[1]), torch.ones(f))
        )
    blocks = [weights.original(*place) for place in weights.places]
    gates = [block.gate for block in blocks if block.gate is not None]
    columns = (torch.stack([seen[place][0] for place in weights.places]), torch.stack([s[1] for s in seen.values()]))
    held = {
        "gate": (torch.stack(gates), columns[0]),
        "up": (torch.stack([block.up for block in blocks]), columns[0]),
        "down": (torch.stack([block.down.T for block in blocks]), columns[1]),
    }
    for name, (matrices, importance) in held.items():
        np.save(folder / f"{name}.npy", np.ascontiguousarray(matrices.numpy()))
        np.save(folder / f"{name}-importance.npy", importance.numpy())


def llama_experts(weights: MemoryWeights, kind: str, folder: Path, llama: LlamaPython) -> LlamaExperts:
    """The experts that `write_experts` wrote, in one of llama.cpp's types.

    Raises:  RuntimeError with what llama.cpp's side said if it failed.
    """
    script = Path(__file__).with_name("llama_quants.py")
    library = ["--libggml", str(llama.libggml)] if llama.libggml else []
    ended = subprocess.run([llama.python, script, folder, kind, *library], stdout=subprocess.PIPE, stderr=sys.stderr)
    if ended.returncode:
        raise RuntimeError(f"{script.name} {kind}: ended with {ended.returncode}")
    gate, up, down = (torch.from_numpy(np.load(folder / f"{name}-stored.npy")) for name in ("gate", "up", "down"))
    held = (gate, up, down.transpose(1, 2).contiguous())
    return LlamaExperts(json.loads(ended.stdout)["bytes"], held, weights.spec.router.num_experts)
