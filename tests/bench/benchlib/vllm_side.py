"""Run by `vllm_logits.py` in the interpreter that has vLLM: what vLLM computes of the models in folders.

It reads lines of JSON, `{"folder": ..., "ids": ..., "dtype": ...}`, and writes a line for each: `{"values": ...}`,
log-probabilities [tokens - 1, vocabulary], or `{"error": ...}`. Each model has a process of its own.

vLLM's CPU build cannot run some models as they are, or runs them wrongly. Three of its parts are replaced, by plain
torch or by other parts of its own; everything else is vLLM's.
"""
# ruff: noqa: E402  # vLLM reads the environment when it is imported

import json
import os
import sys
import traceback
from functools import partialmethod
from pathlib import Path
from typing import Any

for _name, _value in (
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ("VLLM_LOGGING_LEVEL", "ERROR"),
    ("VLLM_NO_USAGE_STATS", "1"),
    ("HF_HUB_OFFLINE", "1"),
):
    os.environ.setdefault(_name, _value)

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as coded,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


def answer(folder: str, ids: list[int], dtype: str) -> list[list[float]]:
    model = LLM(
        folder,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=64 << 20,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        max_logprobs=-1,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    options = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    (found,) = model.generate({"prompt_token_ids": ids}, options, use_tqdm=False)
    return [[row[token].logprob for token in range(len(row))] for row in found.prompt_logprobs[1:]]


def compute_codes_in_torch() -> None:
    """Lets torch compute layers of coded experts from the tensors that vLLM has loaded.

    vLLM's own kernel for such experts on CPUs needs AMX.
    """
    coded.select_wna16_moe_backend = lambda **options: (coded.WNA16MoEBackend.EMULATION, object)
    method = coded.CompressedTensorsWNA16MoEMethod
    method.process_weights_after_loading = _decode
    method.apply = _apply
    method.is_monolithic = property(lambda self: False)
    method.get_fused_moe_quant_config = lambda self, layer: None


def _decode(method: Any, layer: Any) -> None:
    method.gate_up = _decoded(layer.w13_weight_packed.data, layer.w13_weight_scale.data, method.num_bits)
    method.down = _decoded(layer.w2_weight_packed.data, layer.w2_weight_scale.data, method.num_bits)


def _decoded(codes: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    num_experts, num_rows, num_words = codes.shape
    shape = torch.Size((num_rows, num_words * 32 // width))
    values = torch.stack([unpack_from_int32(each, width, shape) for each in codes]).float()
    grouped = values.view(num_experts, num_rows, scales.shape[2], -1) * scales.float()[..., None]
    return grouped.view(num_experts, *shape)


def _apply(
    method: Any, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    outputs = torch.zeros(x.shape)
    num_neurons = method.down.shape[2]
    for token, (shares, experts) in enumerate(zip(topk_weights, topk_ids, strict=True)):
        for share, expert in zip(shares, experts, strict=True):
            scaled = share.float() * x[token].float() if layer.apply_router_weight_on_input else x[token].float()
            both = method.gate_up[expert] @ scaled
            hidden = torch.nn.functional.silu(both[:num_neurons]) * both[num_neurons:]
            made = method.down[expert] @ hidden
            outputs[token] += made if layer.apply_router_weight_on_input else share.float() * made
    return outputs.to(x.dtype)


def rotate_in_torch() -> None:
    """Lets vLLM's plain torch rotate queries of three dimensions.

    Its operator for CPUs takes the stride of a head there for that of a token, and rotates them wrongly: in models that
    rotate heads as such, LFM2 and all with latent attention.
    """
    for kind in _all_kinds(RotaryEmbedding):
        if "forward_cpu" in vars(kind):
            kind.forward_cpu = partialmethod(_rotate, kind.forward_cpu, kind.forward_native)


def _all_kinds(kind: Any) -> list[Any]:
    return [kind, *(lower for each in kind.__subclasses__() for lower in _all_kinds(each))]


def _rotate(self: Any, operator: Any, native: Any, positions: Any, query: torch.Tensor, *others: Any) -> Any:
    return (native if query.dim() == 3 else operator)(self, positions, query, *others)


def route_in_one_group() -> None:
    """Lets vLLM's CPU router choose among all experts as among those of one group.

    Without groups it leaves out the bias of the choice without a word (ERNIE 4.5), and stops at sigmoids (MiniMax-M2).
    """
    route = CPURouter._compute_routing

    def routed(self: Any, hidden_states: Any, router_logits: Any, *others: Any, **options: Any) -> Any:
        has_own_way = self.custom_routing_function is not None or self.scoring_func not in ("softmax", "sigmoid")
        if not self.use_grouped_topk and not has_own_way:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return route(self, hidden_states, router_logits, *others, **options)

    CPURouter._compute_routing = routed


def _in_a_process(request: dict[str, Any], out: int) -> None:
    """Writes the answer to `out`, from a process of its own, whose other output goes nowhere."""
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    line: dict[str, Any]
    try:
        line = {"values": answer(**request)}
    except BaseException as fault:  # whatever it is: the next model has a process of its own
        last = traceback.extract_tb(fault.__traceback__)[-1]
        line = {"error": f"{type(fault).__name__} in {Path(last.filename).name}: {fault}"[:600]}
    os.write(out, json.dumps(line).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)
    if not torch.cpu._is_amx_tile_supported():
        compute_codes_in_torch()
    rotate_in_torch()
    route_in_one_group()
    for asked in sys.stdin:
        _in_a_process(json.loads(asked), answers)
