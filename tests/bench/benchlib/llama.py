"""llama.cpp as a comparison: a process that decodes a GGUF, and experts in its types.

The importance matrix of experts is llama-imatrix's, by its definition: for each expert and column the mean square of
what the matrix is multiplied with, over the tokens that go to that expert, of those sequences of the calibration text
whose inputs a profile keeps; 1 where no token does.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.profile import Profile
from moe_pack.formats import NeuronFunction
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, Expert, NeuronBlock, activations

_SIDE = Path(__file__).with_name("llama_side.py")
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


def llama_option(body: Any) -> Any:
    """Adds `--llama-python` to a command."""
    kind = click.Path(path_type=Path, exists=True, dir_okay=False)
    text = "A Python with llama_cpp, gguf and numpy.  [default: llama.cpp is left out]"
    return click.option("--llama-python", type=kind, help=text)(body)


def libggml_option(body: Any) -> Any:
    """Adds `--libggml` to a command."""
    kind = click.Path(path_type=Path, exists=True, dir_okay=False)
    return click.option("--libggml", type=kind, help="The library, if llama_cpp is not there.")(body)


class Llama:
    """The process of `llama_side.py serve`; ended by `close`."""

    name = "llama.cpp"

    def __init__(self, python: Path, gguf: Path, context: int) -> None:
        command = llama_command(python, gguf, context)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts: dict[str, Any] = json.loads(self._line())

    def time(self, prompt: list[int], tokens: list[int], at_once: bool, threads: int) -> float:
        """Seconds for `tokens` after `prompt`, by the clock of the process."""
        asked = {"prompt": prompt, "tokens": tokens, "at_once": at_once, "threads": threads}
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._line())["seconds"])

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"llama_side.py ended with {self._process.wait()}")
        return line


def llama_command(python: Path, gguf: Path, context: int, mapped: bool = False) -> list[str]:
    """Returns the command line of `llama_side.py serve` on a GGUF."""
    command = [str(python), str(_SIDE), "serve", str(gguf)]
    return [*command, "--context", str(context), *(["--mapped"] if mapped else [])]


def llama_types(*columns: int) -> tuple[str, ...]:
    """Returns the types that can hold rows of so many weights, by rising size."""
    return tuple(kind for kind, block in _BLOCKS.items() if not any(number % block for number in columns))


def experts_with_inputs(checkpoint: Checkpoint, profile: Profile) -> Iterator[tuple[NeuronBlock, Tensor]]:
    """Yields the weights of each expert, layer by layer, and the inputs in a profile that go to it, float32 [n, d]."""
    weights, spec = CheckpointWeights(checkpoint), checkpoint.spec
    for layer_idx in range(len(spec.moe_layers)):
        with profile.inputs(layer_idx) as inputs:
            for expert in range(spec.router.num_experts):
                chosen = ((inputs.experts == expert) & (inputs.weights != 0)).any(axis=1)
                x = inputs.rows(torch.from_numpy(np.flatnonzero(chosen)))
                yield whole_expert(weights.expert(layer_idx, expert)), x


def whole_expert(expert: Expert) -> NeuronBlock:
    """Returns all neurons of an expert with a gate and without biases as one block."""
    blocks = list(expert.blocks())
    gate = torch.cat([block.gate for block in blocks if block.gate is not None]).float()
    return NeuronBlock(
        gate, *(torch.cat([getattr(block, name) for block in blocks]).float() for name in ("up", "down"))
    )


class LlamaExperts:
    """Experts as llama.cpp stores them; matrices and importance lie in `folder`.

    Args:    experts: each with the inputs float32 [n, d] that its importance matrix is made from.   function: of their
             neurons.   libggml: unless the Python has llama_cpp.
    """

    def __init__(
        self,
        experts: Iterable[tuple[NeuronBlock, Tensor]],
        function: NeuronFunction,
        python: Path,
        libggml: Path | None,
        folder: Path,
    ) -> None:
        self._folder = folder
        self._command: list[str | Path] = [python, _SIDE, "quantize", folder]
        self._options: list[str | Path] = ["--libggml", libggml] if libggml else []
        self._write(experts, function)

    @torch.inference_mode()
    def _write(self, experts: Iterable[tuple[NeuronBlock, Tensor]], function: NeuronFunction) -> None:
        """Writes matrices as llama.cpp has them, gate and up [f, d], down [d, f], and the importance of columns."""
        files: dict[str, list[Tensor]] = {
            f"{name}{kind}": [] for name in ("gate", "up", "down") for kind in ("", "-importance")
        }
        for block, x in experts:
            assert block.gate is not None, "llama.cpp's experts have gates"
            h = activations(x, block, function).h
            of_x, of_h = (
                values.square().mean(dim=0) if len(values) else torch.ones(values.shape[1]) for values in (x, h)
            )
            matrices = (("gate", block.gate, of_x), ("up", block.up, of_x), ("down", block.down.T, of_h))
            for name, matrix, importance in matrices:
                files[name].append(matrix)
                files[f"{name}-importance"].append(importance)
        for name, tensors in files.items():
            np.save(self._folder / f"{name}.npy", np.ascontiguousarray(torch.stack(tensors).numpy()))

    def stored_as(self, kind: str) -> tuple[int, list[NeuronBlock]]:
        """Returns the bytes of all experts in one of llama.cpp's types, and what they decode to, layer by layer."""
        ended = subprocess.run([*self._command, kind, *self._options], stdout=subprocess.PIPE, stderr=sys.stderr)
        if ended.returncode:
            raise click.ClickException(f"{_SIDE.name} quantize {kind}: ended with {ended.returncode}")
        gate, up, down = (
            torch.from_numpy(np.load(self._folder / f"{name}-stored.npy")) for name in ("gate", "up", "down")
        )
        num_bytes: int = json.loads(ended.stdout)["bytes"]
        return num_bytes, [NeuronBlock(*matrices) for matrices in zip(gate, up, down.transpose(1, 2), strict=True)]
