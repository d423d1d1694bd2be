"""Predicted prompt tokens a second on a GPU, for three models in four bits: a model, no measurement.

    python tests/bench/gpu_prompts.py

A pass takes the longest of three times: that of the GPU, that of the host, which makes all launches, and that of the
link, which brings the experts that do not fit, each once a pass. The GPU decodes experts at the memory's rate and
multiplies at the rate of its tensor cores; a mixer's chunks follow one another. Launches are counted by the engine
(`gpu.launches`). The first layer's experts come before anything runs.
"""

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # launches are counted in plain memory

import click
from benchlib import finish, json_option, table
from gpu.launches import WAIT, PromptLaunches, count_prompt, is_triton

from moe_pack.formats import dense_roles
from moe_pack.formats.families import model_spec
from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime.gpu.fit import EXACT_HALVES, FAST_HALVES, MOST_CHUNK_TOKENS

# And the share of the experts' rows that 11 GiB lack, of Qwen3.6 by the engine's placement.
_MODELS = {"mixtral-8x7b": 0.45, "qwen3-30b-a3b": 0.40, "qwen3.6-35b-a3b": 0.55}
_BITS = 4.5  # of a weight, with scales and zeros
# Of the host, for a launch by Triton and by torch. On a processor of 2 cores with other work, Triton's took 24 to 50.
_TRITON_S, _TORCH_S = 30e-6, 5e-6
_CHUNK_S, _CHUNK_TOKENS = 6e-6, 16  # a mixer's products, and sums that wait for each other (an assumption)
_HEADER = ("GPU", "model", "memory", "numerics", "512 tokens", "2,048", "8,192", "limited by (2,048)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's rates: bytes a second of memory and link, multiplications and additions a second."""

    name: str
    memory: float
    link: float
    products: float  # of float16 on tensor cores, as Triton's products reach it
    attention: float  # of float16
    attention_exact: float  # of float32


# Memory: 0.8 of the measured copy rate (H200), of the data sheet's (RTX 3090). Products: 0.4 of the data sheet's.
_GPUS = (Gpu("H200", 3.36e12, 50e9, 400e12, 350e12, 25e12), Gpu("RTX 3090", 0.75e12, 24e9, 52e12, 40e12, 14e12))


def pass_seconds(
    gpu: Gpu, model: str, num_tokens: int, before: int, num_halves: int, missing: float, host_s: float
) -> dict[str, float]:
    """Returns the seconds that a pass of so many tokens takes the GPU, the host and the link."""
    spec = model_spec(model, None)
    attention, d, f = spec.attention, spec.hidden_size, spec.expert.intermediate_size
    assert isinstance(attention, GroupedQuerySpec), "all these models have grouped queries"
    num_layers, num_mixers = len(spec.moe_layers), 0 if spec.mixer is None else len(spec.mixer.layers)
    k, num_experts = spec.router.num_experts_per_tok, spec.router.num_experts
    chosen = num_experts * (1 - (1 - k / num_experts) ** num_tokens)
    weights, width = 3 * d * f, attention.num_heads * attention.head_dim
    dense = sum(math.prod(role.shape) for role in dense_roles(spec) if role.name.startswith("layers.")) / num_layers
    is_exact = num_halves == EXACT_HALVES
    products = 2 * num_tokens * (k * weights + dense) * (3 if is_exact else 1) / gpu.products
    # Codes are read, halves written and read again.
    moved = (chosen * weights + dense) * (_BITS / 8 + 2 * 2 * num_halves) / gpu.memory
    attended = 4 * width * num_tokens * (before + num_tokens / 2)
    attended /= gpu.attention_exact if is_exact else gpu.attention
    return {
        "products": num_layers * products,
        "memory": num_layers * moved,
        "attention": (num_layers - num_mixers) * attended,
        "mixers": num_mixers * math.ceil(num_tokens / _CHUNK_TOKENS) * _CHUNK_S,
        "host": host_s,
        "link": num_layers * missing * chosen * weights * _BITS / 8 / gpu.link,
    }


def tokens_per_second(
    gpu: Gpu, model: str, num_tokens: int, num_halves: int, missing: float, host_s: float
) -> tuple[float, str]:
    """Returns the rate of a whole prompt, and what takes its last pass longest."""
    seconds, longest = 0.0, ""
    for before in range(0, num_tokens, MOST_CHUNK_TOKENS):
        number = min(MOST_CHUNK_TOKENS, num_tokens - before)
        parts = pass_seconds(gpu, model, number, before, num_halves, missing, host_s)
        of_gpu = _gpu_seconds(parts)
        first = parts["link"] / len(model_spec(model, None).moe_layers)
        seconds += first + max(of_gpu, parts["host"], parts["link"])
        limits = {**parts, "GPU": of_gpu}
        longest = max(("GPU", "host", "link"), key=lambda name: limits[name])
    return num_tokens / seconds, longest


def _host_seconds(counted: PromptLaunches, steps: int) -> float:
    return _TRITON_S * counted.total(is_triton, steps) + _TORCH_S * counted.total(lambda name: not is_triton(name))


def _parts_text(model: str, num_tokens: int, counted: PromptLaunches) -> str:
    """Says where a resident pass on the first GPU spends its time: exact of 16 tokens, fast of more."""
    gpu, num_halves = _GPUS[0], EXACT_HALVES if num_tokens == 16 else FAST_HALVES
    host_s = _host_seconds(counted, counted.spare_steps)
    parts = pass_seconds(gpu, model, num_tokens, 0, num_halves, 0.0, host_s)
    return (
        f"{model}, {num_halves} float16 a value, {num_tokens} tokens on an {gpu.name}: {1e3 * _gpu_seconds(parts):.0f} "
        f"ms of the GPU, of which {1e3 * parts['memory']:.0f} for memory and {1e3 * parts['mixers']:.0f} for mixers; "
        f"{1e3 * host_s:.0f} ms of the host"
    )


def _gpu_seconds(parts: dict[str, float]) -> float:
    return parts["products"] + parts["memory"] + parts["attention"] + parts["mixers"]


@click.command(help=__doc__)
@json_option
def main(as_json: bool) -> None:
    """Prints the table."""
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as folder:
        launches = {
            (model, num_halves): count_prompt(model, Path(folder), MOST_CHUNK_TOKENS, num_halves)
            for model in _MODELS
            for num_halves in (FAST_HALVES, EXACT_HALVES)
        }
    for (model, num_halves), counted in launches.items():
        triton, torch = counted.total(is_triton), counted.total(lambda name: name != WAIT and not is_triton(name))
        fewer = counted.total(is_triton, counted.spare_steps)
        waits = counted.total(lambda name: name == WAIT)
        notes.append(
            f"{model}, {num_halves} float16 a value: {triton:,} launches of Triton, {fewer:,} with memory to spare, "
            f"{torch:,} of torch, {waits} waits of the host"
        )
    notes += [_parts_text(model, num_tokens, counted) for (model, num_halves), counted in launches.items()
              for num_tokens in (16, 512) if (num_halves == EXACT_HALVES) == (num_tokens == 16)]  # fmt: skip
    for gpu in _GPUS:
        for model, lacking in _MODELS.items():
            for memory, missing in (("all experts", 0.0), ("11 GiB", lacking)):
                for name, num_halves in (("fast", FAST_HALVES), ("exact", EXACT_HALVES)):
                    counted = launches[model, num_halves]
                    steps = counted.num_steps if missing or gpu.name != "H200" else counted.spare_steps
                    host_s = _host_seconds(counted, steps)
                    found = [
                        tokens_per_second(gpu, model, tokens, num_halves, missing, host_s)
                        for tokens in (512, 2048, 8192)
                    ]
                    rows.append((gpu.name, model, memory, name, *(f"{rate:,.0f}" for rate, _ in found), found[1][1]))
    text = "\n".join((table(_HEADER, rows), "", *notes))
    finish({"header": _HEADER, "rows": rows, "launches": notes}, text, as_json)


if __name__ == "__main__":
    main()
