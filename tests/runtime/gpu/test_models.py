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
    (changed(PLAIN, "attention temperature", TEMPERATURE), "attention temperature"),
    (changed(LATENT, "attention temperature", TEMPERATURE), "attention temperature"),
    (changed(LATENT, "attention indexer", {"num_heads": 4, "head_dim": 8, "top_k": 5}), "sparse attention"),
    (changed(LATENT, "attention gated", True), "gates of attention"),
    (changed(LATENT, "router zero_outside", True), "groups of experts that score 0"),
    (changed(LATENT, "attention sinks", True), "sinks of latent attention"),
    (changed(changed(GROUPED, "router num_experts_per_tok", 1), "router on_input", True),
     "router weights on the input of experts"),
    (changed(GROUPED, "logits_softcap", 30.0), "a softcap of logits"),
    (changed(GROUPED, "rope scaling", {"kind": "proportional", "rotated_pairs": 4, "factor": 1.0}),
     "partly rotated pairs"),
    (changed(changed(GROUPED, "attention bias", []), "attention keys_as_values", True), "keys that are values"),
    (changed(GROUPED, "attention v_norm", True), "norms of values"),
    (changed(GROUPED, "attention value_head_dim", 16), "values of another size than keys"),
    (changed(GROUPED, "attention value_scale", 0.5), "scaled values"),
    (changed(GROUPED, "others", [{"layers": [1], "attention": dump(GROUPED.attention), "rope": None}]),
     "several kinds of attention"),
    (changed(GROUPED, "attention gate", {"each": "head", "function": "sigmoid"}), "gates of attention"),
    (changed(LATENT, "attention gate", {"each": "value", "function": "sigmoid"}), "gates of attention"),
    (changed(changed(GROUPED, "norm kind", "layer"), "norm unbiased", True), "layer norms without bias"),
    (changed(GROUPED, "router input_scale", True), "scaled routers"),
    (changed(GROUPED, "router expert_scale", True), "scaled routers"),
    (changed(changed(GROUPED, "router normalize", False), "router num_identity", 2), "experts that return their input"),
    (changed(GROUPED, "router kind", "sqrtsoftplus_topk"), "routers of sqrtsoftplus_topk"),
    (changed(GROUPED, "router kind", "topk_sigmoid"), "routers of topk_sigmoid"),
    (changed(GROUPED, "expert function", "gelu_tanh"), "experts of gelu_tanh"),
    (changed(GROUPED, "attention rotated_layers", [0]), "layers that do not rotate"),
    (changed(GROUPED, "attention chunked", True), "attention in chunks"),
    (changed(GROUPED, "attention qk_norm", "rotated_head"), "norms of rotated heads"),
    (changed(GROUPED, "attention qk_norm", "unit"), "norms of rotated heads"),
    (changed(GROUPED, "attention indexer", BLOCKS), "attention to blocks"),
    (replace(COMPRESSED, others=()), "compressed attention"),
    (changed(GROUPED, "router table_layers", [0]), "a table from tokens to experts"),
]  # fmt: skip


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
    for spec in (GROUPED, LATENT, PLAIN):
        with case(spec.family, spec.attention):
            assert cpu_only(spec) is None
            EngineOptions(device="cuda").check_gpu(spec)
