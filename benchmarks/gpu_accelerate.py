"""Part `accelerate`: Mixtral-8x7B in bf16 by transformers, its weights where Accelerate puts them under the same cap.

The weights are random, made on the spot: one block of values, copied until all parameters are full. Fewer layers are
run where the host's memory has no room for all; the row says how many. transformers 5 holds a layer's experts in two
tensors, so that Accelerate moves all of a layer's for every token.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from gpu_clock import Clock
from gpu_engine import driver_bytes, link_rate
from gpu_packs import make_room
from gpu_results import Results

from moe_pack.runtime import available_bytes

_CAP = "11GiB"
_LAYER_BYTES = 3 << 30  # of Mixtral's, about
_SHARE = 0.85  # of the host's free memory
_BLOCK = 1 << 26  # values
_PROMPT, _TOKENS = 16, 4


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Decoding under Accelerate's offload. `link_share`: of a token's time, what the bytes off the card must take."""

    layers: int
    num_bytes: int
    on_card_bytes: int
    made_s: float
    prefill_s: float
    token_s: list[float]
    decode_per_s: float
    link_share: float
    driver_bytes: int


def run(results: Results, clock: Clock) -> None:
    """Makes the model and decodes a few tokens."""
    make_room(clock.is_rehearsal)
    rate, start = link_rate(clock), time.perf_counter()
    model, layers = _model(clock)
    made_s = time.perf_counter() - start
    parameters = list(model.parameters())
    whole = sum(held.nbytes for held in parameters)
    model = _dispatched(model, clock)
    on_card = sum(held.nbytes for held in model.parameters() if held.device.type == "cuda")
    prefill_s, times = _decode(model, clock)
    token_s = sorted(times)[len(times) // 2]
    share = (whole - on_card) / rate / token_s
    results.add(Offloaded(layers, whole, on_card, made_s, prefill_s, times, 1 / token_s, share, driver_bytes(clock)))


def _model(clock: Clock) -> tuple[Any, int]:
    from accelerate import init_empty_weights
    from transformers import MixtralConfig, MixtralForCausalLM

    layers = 2 if clock.is_rehearsal else min(32, int(_SHARE * (available_bytes() or 0)) // _LAYER_BYTES)
    config = MixtralConfig(num_hidden_layers=layers, dtype="bfloat16")
    if clock.is_rehearsal:
        small: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        config = MixtralConfig(num_hidden_layers=layers, vocab_size=128, num_local_experts=4, **small)
    with init_empty_weights(include_buffers=False):
        model: Any = MixtralForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    block = 0.02 * torch.randn(1 << 12 if clock.is_rehearsal else _BLOCK, dtype=torch.bfloat16)
    for module in model.modules():
        for name, held in list(module.named_parameters(recurse=False)):
            values = torch.empty(held.shape, dtype=torch.bfloat16)
            if held.ndim == 1:
                values.fill_(1.0)
            else:
                _fill(values.view(-1), block)
            setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
    return model, layers


def _fill(values: torch.Tensor, block: torch.Tensor) -> None:
    for start in range(0, len(values), len(block)):
        part = values[start : start + len(block)]
        part.copy_(block[: len(part)])


def _dispatched(model: Any, clock: Clock) -> Any:
    """The model with its layers where Accelerate puts them."""
    from accelerate import dispatch_model, infer_auto_device_map

    if clock.is_rehearsal:
        return dispatch_model(model, {"": "cpu"}, force_hooks=True)
    limits = {0: _CAP, "cpu": "1000GiB"}
    places = infer_auto_device_map(model, limits, no_split_module_classes=["MixtralDecoderLayer"], dtype=torch.bfloat16)
    return dispatch_model(model, places)


@torch.inference_mode()
def _decode(model: Any, clock: Clock) -> tuple[float, list[float]]:
    """Seconds of the prompt, and of each token after it."""
    given = torch.arange(1, _PROMPT + 1, device=clock.device)[None]
    cache, times = None, []
    for _ in range(1 + _TOKENS):
        start = time.perf_counter()
        out = model(given, past_key_values=cache, use_cache=True)
        given, cache = out.logits[:, -1:].argmax(-1).to(clock.device), out.past_key_values
        clock.synchronize()
        times.append(time.perf_counter() - start)
    return times[0], times[1:]
