"""Models that the GPU's engine does not run: refused by name, in runs and in plans, and run by the CPU."""

from dataclasses import replace

from support.cases import case
from support.specs import ANSWERING, COMPRESSED, GROUPED, LATENT, Values, changed

from moe_pack.formats import ModelSpec, RunError, dump
from moe_pack.runtime.engine.options import EngineOptions, cpu_only

TEMPERATURE: Values = {"slope": 0.1, "length": 8, "is_from_one": False, "is_unrotated": False}
BLOCKS: Values = {"kind": "pooled", "num_heads": 2, "head_dim": 32, "block_tokens": 4, "num_blocks": 3}
PLAIN = changed(GROUPED, "attention qk_norm", "none")
REFUSED: list[tuple[ModelSpec, str]] = [
    (ANSWERING, "an encoder"),
    (replace(COMPRESSED, others=()), "compressed attention"),
    (changed(GROUPED, "router table_layers", [0]), "a table from tokens to experts"),
]
# Parts that kernels lack, and that torch computes in a token's graph.
IN_TORCH: list[ModelSpec] = [
    changed(PLAIN, "attention temperature", TEMPERATURE),
    changed(LATENT, "attention temperature", TEMPERATURE),
    changed(LATENT, "attention indexer", {"num_heads": 4, "head_dim": 8, "top_k": 5}),
    changed(LATENT, "attention gated", True),
    changed(LATENT, "router zero_outside", True),
    changed(LATENT, "attention sinks", True),
    changed(changed(GROUPED, "router num_experts_per_tok", 1), "router on_input", True),
    changed(GROUPED, "logits_softcap", 30.0),
    changed(GROUPED, "attention v_norm", True),
    changed(GROUPED, "attention value_head_dim", 16),
    changed(GROUPED, "others", [{"layers": [1], "attention": dump(GROUPED.attention), "rope": None}]),
    changed(GROUPED, "attention gate", {"each": "head", "function": "sigmoid"}),
    changed(changed(GROUPED, "norm kind", "layer"), "norm unbiased", True),
    changed(GROUPED, "router expert_scale", True),
    changed(changed(GROUPED, "router normalize", False), "router num_identity", 2),
    changed(GROUPED, "router kind", "sqrtsoftplus_topk"),
    changed(GROUPED, "expert function", "gelu_tanh"),
    changed(GROUPED, "attention rotated_layers", [0]),
    changed(GROUPED, "attention chunked", True),
    changed(GROUPED, "attention qk_norm", "unit"),
    changed(GROUPED, "attention indexer", BLOCKS),
]


def test_what_a_gpu_does_not_run_is_refused_by_name() -> None:
    options = EngineOptions(device="cuda")
    for spec, part in REFUSED:
        with case(part):
            assert cpu_only(spec) == part
            try:
                options.check_gpu(spec)
            except RunError as refused:
                assert str(refused) == f"--device cuda does not support models with {part}; use --device cpu"
            else:
                raise AssertionError("accepted")


def test_what_a_gpu_runs_is_accepted() -> None:
    for spec in (GROUPED, LATENT, PLAIN, *IN_TORCH):
        with case(spec.family, spec.attention):
            assert cpu_only(spec) is None
            EngineOptions(device="cuda").check_gpu(spec)
