"""The shapes of a pack's dense tensors, for the second reader: written from docs/model.md alone."""

from typing import Any

Shape = tuple[int, ...]


class BadPackError(Exception):
    """The pack is not what docs/model.md says."""


def require(fulfilled: object, fault: str) -> None:
    if not fulfilled:
        raise BadPackError(fault)


def stream_shapes(residual: dict[str, Any], name: str, d: int) -> list[tuple[str, Shape]]:
    n, is_half = residual.get("streams", 0), name != "streams"
    if residual["kind"] == "gated_streams":
        rank = residual["rank"]
        shapes: dict[str, Shape] = {"norm": (n * d,), "down": (rank, n * d), "up": (n * d, rank)}
        shapes |= {"inject": (n, n * d)} if is_half else {}
    elif residual["kind"] == "mixed_streams":
        mixes = residual["mixing"] > 0
        number = (2 * n + n * n if mixes else 2 * n) if is_half else n
        scales = (3 if mixes else 2) if is_half else 1
        shapes = {"weights": (number, n * d), "base": (number,), "scale": (scales,)}
    else:
        return []
    return [(f"{name}.{role}", shape) for role, shape in shapes.items()]


def gated_norm_shapes(residual: dict[str, Any], name: str, d: int) -> list[tuple[str, Shape]]:
    return [(f"{name}.down", (residual["rank"], d)), (f"{name}.up", (d, residual["rank"]))]


def relative_shapes(attention: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    width = attention["num_heads"] * attention["head_dim"]
    return [("q", (width, d)), ("k", (width, d)), ("v", (width, d)), ("o", (d, width))]


def gate_shapes(attention: dict[str, Any], size: int, d: int) -> list[tuple[str, Shape]]:
    if (gate := attention.get("gate")) is None:
        return []
    require(gate["each"] in ("head", "value"), "manifest.json: gates of attention")
    h = attention["num_heads"]
    shapes: list[tuple[str, Shape]] = [("gate", (h * (size if gate["each"] == "value" else 1), d))]
    return [*shapes, ("gate_bias", (h,))] if gate.get("bias", False) else shapes


def attention_shapes(attention: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    shapes: list[tuple[str, Shape]] = []
    if attention["kind"] == "grouped_query":
        size = attention["head_dim"]
        q, kv = attention["num_heads"] * size, attention["num_kv_heads"] * size
        queries = 2 * q if attention.get("gated", False) else q
        u = attention.get("value_head_dim", size)
        values, mixed = attention["num_kv_heads"] * u, attention["num_heads"] * u
        for name, shape in {"q": (queries, d), "k": (kv, d), "v": (values, d), "o": (d, mixed)}.items():
            if name == "v" and attention.get("keys_as_values", False):
                continue
            shapes.append((name, shape))
            if name in attention["bias"]:
                shapes.append((f"{name}_bias", (shape[0],)))
        shapes += gate_shapes(attention, u, d)
        if attention.get("sinks", False):
            shapes.append(("sinks", (attention["num_heads"],)))
        if attention["qk_norm"] in ("head", "rotated_head"):
            shapes += [("q_norm", (size,)), ("k_norm", (size,))]
        elif attention["qk_norm"] == "projection":
            shapes += [("q_norm", (q,)), ("k_norm", (kv,))]
        if "indexer" in attention:
            m, i = attention["indexer"]["num_heads"], attention["indexer"]["head_dim"]
            shapes += [("index_q", (m * i, d)), ("index_k", (i, d)), ("index_q_norm", (i,)), ("index_k_norm", (i,))]
    elif attention["kind"] == "relative":
        shapes += relative_shapes(attention, d)
    elif attention["kind"] == "compressed":
        shapes += compressed_shapes(attention, d)
    else:
        require(attention["kind"] == "latent", "manifest.json: kind of attention")
        h, q_rank, kv_rank = (attention[key] for key in ("num_heads", "q_lora_rank", "kv_lora_rank"))
        n, r, v = (attention[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if q_rank is None:
            shapes.append(("q", (h * (n + r), d)))
        else:
            q_b = (h * (n + r + v), 2 * q_rank) if attention.get("gated", False) else (h * (n + r), q_rank)
            shapes += [("q_a", (q_rank, d)), ("q_a_norm", (q_rank,)), ("q_b", q_b)]
        shapes += [("kv_a", (kv_rank + r, d)), ("kv_a_norm", (kv_rank,)), ("kv_b", (h * (n + v), kv_rank))]
        shapes.append(("o", (d, h * v)))
        shapes += gate_shapes(attention, v, d)
        if attention.get("sinks", False):
            shapes.append(("sinks", (h,)))
        if "indexer" in attention and not attention["indexer"].get("shared", False):
            heads, width = attention["indexer"]["num_heads"], attention["indexer"]["head_dim"]
            shapes += [("index_q", (heads * width, q_rank)), ("index_k", (width, d)), ("index_k_norm", (width,))]
            shapes += [("index_k_norm_bias", (width,)), ("index_weights", (heads, d))]
    return [(f"attention.{role}", shape) for role, shape in shapes]


def compressed_shapes(attention: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    h, n, q_rank = (attention[key] for key in ("num_heads", "head_dim", "q_lora_rank"))
    g, rank = attention["num_groups"], attention["o_lora_rank"]
    shapes: list[tuple[str, Shape]] = [
        ("q_a", (q_rank, d)), ("q_a_norm", (q_rank,)), ("q_b", (h * n, q_rank)), ("kv", (n, d)), ("kv_norm", (n,)),
        ("sinks", (h,)), ("o_a", (g * rank, h * n // g)), ("o_b", (d, g * rank)),
    ]  # fmt: skip
    if (compression := attention["compression"]) is None:
        return shapes
    c, size, indexer = 2 if compression["overlap"] else 1, compression["window_tokens"], compression["indexer"]
    dims = {"entry": n} | ({} if indexer is None else {"index": indexer["head_dim"]})
    for name, dim in dims.items():
        shapes += [(f"{name}_kv", (c * dim, d)), (f"{name}_gate", (c * dim, d))]
        shapes += [(f"{name}_positions", (size, c * dim)), (f"{name}_norm", (dim,))]
    if indexer is not None:
        shapes.append(("index_q", (indexer["num_heads"] * indexer["head_dim"], q_rank)))
        shapes.append(("index_weights", (indexer["num_heads"], d)))
    return shapes


def mixer_shapes(mixer: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    shapes = {
        "gated_delta_net": gated_delta, "kimi_delta_attention": kimi_delta, "mamba2": mamba2, "mamba": mamba,
        "short_conv": short_conv, "lightning_attention": lightning,
    }  # fmt: skip
    require(mixer["kind"] in shapes, "manifest.json: kind of mixer")
    return [(f"mixer.{role}", shape) for role, shape in shapes[mixer["kind"]](mixer, d)]


def lightning(mixer: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    w = mixer["num_heads"] * mixer["head_dim"]
    return [("qkv", (3 * w, d)), ("gate", (w, d)), ("out_norm", (w,)), ("o", (d, w))]


def gated_delta(mixer: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    h, taps = mixer["num_value_heads"], mixer["conv_kernel"]
    v = h * mixer["value_head_dim"]
    c = 2 * mixer["num_key_heads"] * mixer["key_head_dim"] + v
    if mixer["interleaved"]:
        shapes: list[tuple[str, Shape]] = [("qkvz", (c + v, d)), ("ba", (2 * h, d))]
    else:
        shapes = [("qkv", (c, d)), ("z", (v, d)), ("b", (h, d)), ("a", (h, d))]
    shapes += [("conv", (c * taps,)), ("a_log", (h,)), ("dt_bias", (h,)), ("out_norm", (mixer["value_head_dim"],))]
    return [*shapes, ("o", (d, v))]


def kimi_delta(mixer: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    h, size, taps = mixer["num_heads"], mixer["head_dim"], mixer["conv_kernel"]
    w = h * size
    is_full = mixer.get("full_rank", False)
    ranked: dict[str, list[tuple[str, Shape]]] = {
        name: [(name, (w, d))] if is_full else [(f"{name}_a", (size, d)), (f"{name}_b", (w, size))]
        for name in ("decay", "gate")
    }
    return [
        *((name, (w, d)) for name in ("q", "k", "v")), *((f"{name}_conv", (w * taps,)) for name in ("q", "k", "v")),
        ("b", (h, d)), *ranked["decay"], ("a_log", (h,)), ("dt_bias", (w,)), *ranked["gate"], ("out_norm", (size,)),
        ("o", (d, w)),
    ]  # fmt: skip


def mamba2(mixer: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    h, w = mixer["num_heads"], mixer["num_heads"] * mixer["head_dim"]
    c = w + 2 * mixer["num_groups"] * mixer["state_size"]
    shapes: list[tuple[str, Shape]] = [
        ("in", (w + c + h, d)), ("in_bias", (w + c + h,)), ("conv", (c * mixer["conv_kernel"],)), ("conv_bias", (c,)),
        ("a_log", (h,)), ("dt_bias", (h,)), ("skip", (h,)), ("out_norm", (w,)), ("o", (d, w)), ("o_bias", (d,)),
    ]  # fmt: skip
    present = {"in_bias": mixer["proj_bias"], "conv_bias": mixer["conv_bias"], "o_bias": mixer["proj_bias"]}
    return [(name, shape) for name, shape in shapes if present.get(name, True)]


def mamba(mixer: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    c, n, rank = mixer["channels"], mixer["state_size"], mixer["step_rank"]
    shapes: list[tuple[str, Shape]] = [
        ("in", (2 * c, d)), ("in_bias", (2 * c,)), ("conv", (c * mixer["conv_kernel"],)), ("conv_bias", (c,)),
        ("x", (rank + 2 * n, c)), ("dt_norm", (rank,)), ("b_norm", (n,)), ("c_norm", (n,)), ("dt", (c, rank)),
        ("dt_bias", (c,)), ("a_log", (c * n,)), ("skip", (c,)), ("o", (d, c)), ("o_bias", (d,)),
    ]  # fmt: skip
    present = {"in_bias": mixer["proj_bias"], "conv_bias": mixer["conv_bias"], "o_bias": mixer["proj_bias"]}
    return [(name, shape) for name, shape in shapes if present.get(name, True)]


def short_conv(mixer: dict[str, Any], d: int) -> list[tuple[str, Shape]]:
    c = mixer["channels"]
    shapes: list[tuple[str, Shape]] = [
        ("in", (3 * c, d)), ("in_bias", (3 * c,)), ("conv", (c * mixer["conv_kernel"],)), ("conv_bias", (c,)),
        ("o", (d, c)), ("o_bias", (d,)),
    ]  # fmt: skip
    return [(name, shape) for name, shape in shapes if mixer["bias"] or not name.endswith("bias")]
