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
from moe_pack.runtime import NeuronBlock, activations

# Those of 2 to 4.5 bits a weight that take an importance matrix.
LLAMA_TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "IQ4_NL", "Q4_K")
_BLOCK = 256  # weights; rows are made of such, but for IQ4_NL


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


def can_hold(weights: MemoryWeights) -> bool:
    """Whether llama.cpp's types can hold this model's rows."""
    return weights.spec.hidden_size % _BLOCK == weights.spec.expert.intermediate_size % _BLOCK == 0


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
