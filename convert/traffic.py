"""What a profile knows of routes, as the cost model wants it."""

from dataclasses import replace

import numpy as np

from moe_pack.calib import Losses, Profile, most_routing_bytes, routing_of
from moe_pack.convert.machine_tier import Traffic
from moe_pack.formats import ModelSpec, RunError
from moe_pack.runtime import Passes, routing_file_bytes


def traffic_of(profile: Profile, losses: Losses) -> Traffic:
    """The routes that a plan replays, and what foretells experts: as `convert` puts it beside the pack."""
    routing = routing_of(profile)
    found = Traffic(losses.popularity, None, routing.best_recall, routing_file_bytes(routing))
    return replace(found, passes=held_out_passes(profile)) if profile.num_held_out_tokens else found


def assumed_traffic(spec: ModelSpec, losses: Losses) -> Traffic:
    """The same without a profile: routes drawn by the losses' popularity, and the most that a profile may take."""
    return Traffic(losses.popularity, predictor_bytes=most_routing_bytes(spec))


def held_out_passes(profile: Profile) -> Passes:
    """The routes of the text that the profile's predictors have not seen, a token a pass; popularity of the rest.

    Raises:  RunError if no text was held out.
    """
    if not profile.num_held_out_tokens:
        raise RunError(f"{profile.folder}: holds no text out; profile more text")
    layers = [profile.statistics(layer_idx) for layer_idx in range(len(profile.spec.moe_layers))]
    routes = np.stack([layer.routes[-profile.num_held_out_tokens :] for layer in layers], axis=1)
    learned = np.stack([layer.tokens.astype(np.int64) - layer.held_out_tokens for layer in layers])
    popularity = (learned / learned.sum(axis=1, keepdims=True)).astype("<f4")
    return Passes(routes, np.ones(len(routes), "<u4"), None, popularity)
