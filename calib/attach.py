"""What a profile knows of routes, put beside a pack of the same model, where the runtime looks for it."""

import math

import numpy as np

from moe_pack.calib.arrays import Array
from moe_pack.calib.mlp_predictor import shapes_for
from moe_pack.calib.profile import Profile
from moe_pack.calib.profiler import PATH_BYTES
from moe_pack.calib.provenance import packed_source_digest
from moe_pack.formats import ModelSpec, Pack, PlanError, tensor_sidecar_bytes
from moe_pack.runtime import (
    MAX_PREVIOUS,
    MAX_ROUTED_TOKENS,
    NO_PREDICTOR,
    PREDICTORS,
    Predictor,
    Routing,
    write_routing,
)

_KEY_ARRAY_BYTES = 512  # at most, of an array's name, numbers and padding


def attach(pack: Pack, profile: Profile) -> Routing:
    """Writes `routing.safetensors` beside a pack from a profile of the checkpoint that it was made from.

    Raises:  PlanError if the profile is of another checkpoint; ConversionError if somebody is writing in the folder.
    """
    _check_same(pack, profile)
    routing = routing_of(profile)
    write_routing(pack, routing)
    return routing


def routing_of(profile: Profile, most_tokens: int = MAX_ROUTED_TOKENS) -> Routing:
    """What a runtime wants of a profile; networks are read from it when they are asked for.

    Args:    most_tokens: whose routes are kept.
    """
    layers = range(len(profile.spec.moe_layers))
    popularity, mass, routes = [], [], []
    length = min(profile.layer_tokens, most_tokens)
    kept = _kept_tokens(profile, length, most_tokens)
    for layer_idx in layers:
        counted = profile.statistics(layer_idx)
        popularity.append(counted.chosen())
        mass.append(counted.mass)
        routes.append(counted.routes[kept])
    recalls = np.full((len(layers), len(PREDICTORS), 3), np.nan, "<f4")
    best = np.full(len(layers), NO_PREDICTOR, "<u1")
    for layer_idx in layers:
        if profile.has_predictors(layer_idx):
            judged = profile.predictors(layer_idx)
            recalls[layer_idx], best[layer_idx] = judged.experts, judged.best[0]

    def network(layer_idx: int) -> Predictor:
        return profile.predictors(layer_idx).network

    joined: Array = np.stack(routes, axis=1)  # [T, k] of each layer -> [T, L, k]
    return Routing(np.stack(popularity), np.stack(mass), profile.paths(), recalls, best, joined, length, network)


def most_routing_bytes(spec: ModelSpec) -> int:
    """The most that `routing.safetensors` can take beside a pack of this model, whatever was profiled.

    Meaning: routes of as many tokens as are kept, tables of as many counts as can be and keys up to PATH_BYTES, and
             for every layer but the first the larger network; with an encoder its decoder's first has none either.
    """
    L, E, k, d = len(spec.moe_layers), spec.router.num_experts, spec.router.num_experts_per_tok, spec.hidden_size
    tables = {"popularity": (L, E), "after_one": (max(L - 1, 0), E, E), "after_two": (max(L - 2, 0), E, E)}
    keys = max(0, PATH_BYTES - sum(4 * math.prod(shape) for shape in tables.values()))
    h = shapes_for(d, E)[1].hidden
    arrays = [
        ("popularity", "U32", (L, E)),
        ("mass", "F32", (L, E)),
        ("recalls", "F32", (L, len(PREDICTORS), 3)),
        ("best", "U8", (L,)),
        ("routes", "U16", (MAX_ROUTED_TOKENS, L, k)),
        ("sequence_length", "U32", (1,)),
        *((f"paths.{name}", "U32", shape) for name, shape in tables.items()),
        ("paths.key_starts", "U32", (L + 1,)),
        # Each of the six other arrays of keys is padded by itself, and has a name in the header.
        ("paths.keys", "U8", (keys + 6 * _KEY_ARRAY_BYTES,)),
    ]
    for layer_idx in range(1, L):
        network = {
            "x_weight": ("BF16", (h, d)),
            "route_weight": ("BF16", (h, MAX_PREVIOUS, E)),
            "bias": ("F32", (h,)),
            "out_weight": ("BF16", (E, h)),
            "out_bias": ("F32", (E,)),
        }
        arrays += [(f"network.{layer_idx}.{name}", *held) for name, held in network.items()]
    return tensor_sidecar_bytes(arrays)


def _kept_tokens(profile: Profile, length: int, most_tokens: int) -> slice:
    """The first held-out tokens, in sequences of `length`: whole ones, or the first part of one that is too long."""
    first = profile.num_tokens - profile.num_held_out_tokens
    return slice(first, first + min(profile.facts.text.num_held_out, most_tokens // length) * length)


def _check_same(pack: Pack, profile: Profile) -> None:
    if (profile.spec, profile.facts.source) != (pack.spec, packed_source_digest(pack)):
        what = "of another model" if profile.spec != pack.spec else "of another checkpoint of this model"
        raise PlanError(f"--profile {profile.folder}: found a profile {what}; profile the one packed in {pack.folder}")
