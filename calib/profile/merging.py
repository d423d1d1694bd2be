"""Merges profiles of one checkpoint on different texts, as if their texts had been profiled together.

Routes, counts, kept inputs and path statistics are those of a profile of all texts. Means over tokens are averaged by
tokens; quantiles are those of the mixed distributions; networks are one profile's. docs/profile.md gives the errors.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moe_pack import formats
from moe_pack.calib import forward, statistics
from moe_pack.calib.forward.experts import joined_input_pieces
from moe_pack.calib.profile import profiler
from moe_pack.calib.profile.profiles import (
    EFFECTS_FILE,
    EXACT_FILE,
    PATHS_FILE,
    TOKENS_FILE,
    Profile,
    ProfileFacts,
    TextFacts,
    facts_bytes,
    layer_file,
)
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.pack import manifests
from moe_pack.formats.parts.specs import first_moe_layers
from moe_pack.runtime import offload

_BY_ROUTES = slice(0, 2)  # of PREDICTORS: popularity and path statistics
_NETWORKS = [offload.PREDICTORS.index(name) for name in offload.PREDICTORS if name.startswith("MLP")]


def merge_profiles(
    profiles: Sequence[Profile], folder: Path, progress: formats.Progress = formats.NO_PROGRESS
) -> Profile:
    """Merges profiles into `folder`, and continues where a killed run stopped.

    Raises:  UsageError for fewer than two profiles; PlanError if checkpoints or options differ, or texts are the same;
             ConversionError if the folder contains something else.
    """
    if len(profiles) < 2:
        raise formats.UsageError("merge: found one profile, expected two or more")
    for number, profile in enumerate(profiles):
        _check_alike(profiles[0], profile)
        _check_new_texts(profiles[:number], profile)
    merge = _Merge(profiles)
    if (profile_there := profiler.finished(folder, merge.facts)) is not None:
        return profile_there
    with closing(forward.ProfileStore(folder, profiler.identity_of(merge.facts))) as store:
        merge.write(store, progress)
    return Profile(folder)


def _check_alike(first: Profile, other: Profile) -> None:
    if (first.spec, first.facts.source) != (other.spec, other.facts.source):
        raise formats.PlanError(
            f"{other.folder}: the profile is of another checkpoint than {first.folder}; "
            "merge profiles of one checkpoint"
        )
    for name, values in {
        "--sequence-length": tuple(each.facts.text.sequence_length for each in (first, other)),
        "--rotate": (first.facts.rotate, other.facts.rotate),
        "--sensitivity": (first.facts.sensitivity, other.facts.sensitivity),
    }.items():
        if values[0] != values[1]:
            raise formats.PlanError(
                f"{other.folder}: made with {name} {values[1]}, but {first.folder} with {name} {values[0]}; "
                "make both with the same options"
            )
    if first.has_inputs != other.has_inputs:
        without = other if first.has_inputs else first
        raise formats.PlanError(
            f"{without.folder}: keeps no inputs of experts, but the other profile does; make both alike"
        )


def _check_new_texts(merged: Sequence[Profile], profile: Profile) -> None:
    known = {text.sha256: other for other in merged for text in texts_of(other.facts)}
    for text in texts_of(profile.facts):
        if text.sha256 in known:
            raise formats.PlanError(
                f"{profile.folder}: has the same text ({text.name}) as {known[text.sha256].folder}; "
                "merge each text once"
            )


def texts_of(facts: ProfileFacts) -> tuple[TextFacts, ...]:
    """Returns the texts that a profile was made on: one, or those of the profiles that were merged."""
    return facts.texts or (facts.text,)


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """The part of a profile in the merged one."""

    profile: Profile
    learned: forward.Array  # its sequences that are not held out, in their new order
    kept: forward.Array  # the sequences in its files of inputs that stay, rising

    def sequences(self, values: forward.Array) -> tuple[forward.Array, forward.Array]:
        by_sequence = values.reshape(self.profile.facts.text.num_sequences, -1, *values.shape[1:])
        return by_sequence[self.learned], by_sequence[len(self.learned) :]


def _shares(profiles: Sequence[Profile]) -> list[_Share]:
    """Returns the part of each profile.

    Sequences that are not held out follow profile by profile. As many keep their inputs, at the same places, as in a
    profile of all texts. A profile without the inputs of a place puts another of its sequences there, evenly spread.
    """
    texts = [profile.facts.text for profile in profiles]
    num_learned = [text.num_sequences - text.num_held_out for text in texts]
    wanted = forward.num_kept_sequences(profiles[0].spec, sum(num_learned), profiles[0].layer_tokens)
    num_kept = min(wanted, sum(text.num_kept for text in texts))
    places, first, shares = forward.sample_places(sum(num_learned), num_kept).numpy(), 0, []
    for profile, text, number in zip(profiles, texts, num_learned, strict=True):
        own = forward.sample_places(number, text.num_kept).numpy()
        wanted_places = places[(places >= first) & (places < first + number)] - first
        chosen = wanted_places
        if not np.isin(chosen, own).all():
            chosen = own[forward.sample_places(len(own), len(chosen)).numpy()]
        learned = np.empty(number, np.int64)
        learned[wanted_places] = chosen
        others = np.ones(number, bool)
        others[wanted_places] = False
        learned[others] = np.setdiff1d(np.arange(number), chosen)
        shares.append(_Share(profile, learned, np.searchsorted(own, chosen)))
        first += number
    return shares


class _Merge:
    def __init__(self, profiles: Sequence[Profile]) -> None:
        self._profiles = profiles
        self._spec = profiles[0].spec
        self._shares = _shares(profiles)
        self._weights = np.asarray([profile.num_tokens for profile in profiles], np.float64)
        self._most = profiles[int(self._weights.argmax())]  # whose text has the most tokens, of equals the first
        tokens = [share.sequences(share.profile.tokens().sequences) for share in self._shares]
        self._tokens = self._in_order(tokens).reshape(-1, profiles[0].facts.text.sequence_length)
        self.facts = self._facts()

    def _facts(self) -> ProfileFacts:
        texts = [profile.facts.text for profile in self._profiles]
        text = TextFacts(
            " + ".join(text.name for text in texts),
            hashlib.sha256(self._tokens.astype("<i4").tobytes()).hexdigest(),
            len(self._tokens),
            texts[0].sequence_length,
            sum(text.num_held_out for text in texts),
            sum(len(share.kept) for share in self._shares),
        )
        made_with = {package for profile in self._profiles for package in profile.facts.made_with}
        return dataclasses.replace(
            self._profiles[0].facts,
            text=text,
            texts=tuple(text for profile in self._profiles for text in texts_of(profile.facts)),
            made_with=tuple(sorted(made_with, key=lambda package: (package.name, package.version))),
            files=(),
            sha256="",
        )

    def write(self, store: forward.ProfileStore, progress: formats.Progress) -> None:
        spec, sensitivity = self._spec, self.facts.sensitivity
        progress.begin(Stage("merge", spec.num_hidden_layers, "layers"))
        store.write(TOKENS_FILE, {"tokens": self._tokens.astype(np.uint32)})
        if (vectors := self._most.rotation()) is not None:
            store.replace(manifests.ROTATION_FILE, (manifests.rotation_bytes(vectors),))
        paths = self._paths()
        store.write(PATHS_FILE, paths.arrays())
        for layer in range(spec.num_hidden_layers):
            if layer in spec.moe_layers:
                self._write_layer(store, spec.moe_layers.index(layer), layer, paths)
            name = layer_file("sensitivity", layer)
            if sensitivity != "none" and not store.has(name):
                store.write(name, self._losses(layer))
            progress.advance(1, f"layer {layer}")
        if sensitivity != "none":
            store.write(EFFECTS_FILE, self._mean_arrays(lambda profile: profile.effects().arrays()))
        if sensitivity == "exact":
            store.write(EXACT_FILE, self._mean_arrays(Profile.exact))
        files = tuple(profiler.listed(path) for path in sorted(store.folder.glob("*.safetensors")))
        store.seal(facts_bytes(dataclasses.replace(self.facts, files=files)))
        progress.end()

    def _write_layer(
        self, store: forward.ProfileStore, layer_idx: int, layer: int, paths: offload.PathStatistics
    ) -> None:
        name = layer_file("statistics", layer)
        if not store.has(name):
            store.write(name, self._statistics(layer_idx).arrays())
        name = layer_file("inputs", layer)
        if self.facts.text.num_kept and not store.has(name):
            store.replace(name, self._input_pieces(layer_idx))
        name = layer_file("predictors", layer)
        judges = any(profile.has_predictors(layer_idx) for profile in self._profiles)
        if judges and not store.has(name):
            store.write(name, self._predictors(layer_idx, paths).arrays())

    # --- what a profile of all texts has too

    def _in_order(self, values: Sequence[tuple[forward.Array, forward.Array]]) -> forward.Array:
        """Joins values by sequence, held-out ones last."""
        return np.concatenate([learned for learned, _ in values] + [held_out for _, held_out in values])

    def _routes(self, layer_idx: int) -> forward.Array:
        routes = [share.sequences(share.profile.statistics(layer_idx).routes) for share in self._shares]
        return self._in_order(routes).reshape(-1, self._spec.router.num_experts_per_tok)

    def _paths(self) -> offload.PathStatistics:
        learned = (len(self._tokens) - self.facts.text.num_held_out) * self._profiles[0].layer_tokens
        routes = np.stack([self._routes(l)[:learned] for l in range(len(self._spec.moe_layers))], axis=1)
        return statistics.learn_paths(
            routes, self._spec.router.num_experts, profiler.PATH_BYTES, first_moe_layers(self._spec)
        )

    def _input_pieces(self, layer_idx: int) -> Iterator[bytes]:
        length = self._profiles[0].layer_tokens
        with ExitStack() as opened:
            kept = []
            for share in self._shares:
                inputs = opened.enter_context(share.profile.inputs(layer_idx))
                token_idx = torch.from_numpy(share.kept)[:, None] * length + torch.arange(length)
                kept.append((inputs, token_idx.flatten()))
            yield from joined_input_pieces(self._spec, kept)

    # --- figures

    def _statistics(self, layer_idx: int) -> statistics.LayerStatistics:
        counted = [profile.statistics(layer_idx) for profile in self._profiles]
        tokens = np.stack([each.tokens for each in counted]).astype(np.float64)  # [P, E]
        # An expert that no text reached has the quantiles of its layer, whose tokens then count.
        of_layers = np.broadcast_to(tokens.sum(axis=1, keepdims=True), tokens.shape)
        quantile_weights = np.where(tokens.sum(axis=0) > 0, tokens, of_layers)
        means, deviations = np.stack([each.cosine for each in counted], axis=1).astype(np.float64)  # [P] both
        mean = np.average(means, weights=self._weights)
        square = np.average(deviations**2 + means**2, weights=self._weights) - mean**2
        shares = _by_expert([each.hot for each in counted], tokens)
        summed = ("tokens", "held_out_tokens", "mass", "coactivation", "input_squares", "hidden_squares")
        return statistics.LayerStatistics(
            routes=self._routes(layer_idx),
            quantiles=mixed_quantiles(np.stack([each.quantiles for each in counted]), quantile_weights),
            hot_thresholds=_by_expert([each.hot_thresholds for each in counted], tokens).astype(np.float32),
            hot=shares.round().astype(np.uint16),
            cosine=np.asarray([mean, np.sqrt(np.maximum(square, 0))], np.float32),
            **{name: _sum([getattr(each, name) for each in counted]) for name in summed},
        )

    def _losses(self, layer: int) -> dict[str, forward.Array]:
        """Returns the mean losses of the profiles in which the layer is rotated as in the merged profile."""
        alike = [self._is_rotated(profile, layer) == self._is_rotated(self._most, layer) for profile in self._profiles]
        return self._mean_arrays(lambda profile: profile.second_order_losses(layer).arrays(), np.asarray(alike))

    def _is_rotated(self, profile: Profile, layer: int) -> bool:
        vectors = profile.rotation()
        if vectors is None or layer not in self._spec.moe_layers:
            return False
        return bool(vectors.input[self._spec.moe_layers.index(layer)].any())

    def _mean_arrays(
        self, read: Callable[[Profile], dict[str, forward.Array]], counts: forward.Array | None = None
    ) -> dict[str, forward.Array]:
        """Returns the means of arrays by name, weighted by tokens."""
        weights = self._weights if counts is None else self._weights * counts
        found = [read(profile) for profile in self._profiles]
        return {
            name: np.average(np.stack([each[name] for each in found]), axis=0, weights=weights).astype(np.float32)
            for name in found[0]
        }

    def _predictors(self, layer_idx: int, paths: offload.PathStatistics) -> statistics.LayerPredictors:
        """Returns the recalls, and the network and its recall from the profile with the most tokens.

        The merged routes judge popularity and path statistics; other recalls are means by judged tokens.
        """
        profiles = [profile for profile in self._profiles if profile.has_predictors(layer_idx)]
        judged = [profile.predictors(layer_idx) for profile in profiles]
        weights = np.asarray([_num_judged(profile) for profile in profiles], np.float64)
        most = judged[int(np.argmax([profile.num_tokens for profile in profiles]))]
        experts = _mean_of_known([each.experts for each in judged], weights)
        experts[_NETWORKS] = most.experts[_NETWORKS]
        begin = max(first for first in first_moe_layers(self._spec) if first <= layer_idx)  # of its stack
        text, length = self.facts.text, self._profiles[0].layer_tokens
        _, held_out = statistics.Shares.of(text.num_sequences, length, text.num_held_out).tokens()
        history = [self._routes(l)[held_out].astype(np.int64) for l in range(max(layer_idx - 2, begin), layer_idx + 1)]
        experts[_BY_ROUTES] = statistics.judge_by_routes(layer_idx, paths, [torch.from_numpy(h) for h in history])
        return statistics.LayerPredictors(
            experts=experts,
            neurons=_mean_of_known([each.neurons for each in judged], weights),
            best=np.asarray([np.nanargmax(experts[:, 0])], np.uint8),
            network=most.network,
        )


def _num_judged(profile: Profile) -> int:
    text = profile.facts.text
    return statistics.Shares.of(text.num_sequences, profile.layer_tokens, text.num_held_out).num_judged


def _sum(arrays: Sequence[forward.Array]) -> forward.Array:
    """Returns the sum in the arrays' dtype; of floats in float64 first."""
    wide = np.float64 if arrays[0].dtype.kind == "f" else np.uint64
    return np.asarray(np.sum(np.stack(arrays).astype(wide), axis=0).astype(arrays[0].dtype))


def _by_expert(arrays: Sequence[forward.Array], tokens: forward.Array) -> forward.Array:
    """Returns means float64 [E, ...], weighted by tokens [P, E]; 0 for an expert without tokens."""
    weights = tokens / np.maximum(tokens.sum(axis=0), 1)
    return np.asarray(np.einsum("pe,pe...->e...", weights, np.stack(arrays).astype(np.float64)))


def _mean_of_known(arrays: Sequence[forward.Array], weights: forward.Array) -> forward.Array:
    """Returns the weighted mean of the finite values, float32; NaN where there is none."""
    values = np.stack(arrays).astype(np.float64)
    known = ~np.isnan(values)
    counts = known * weights.reshape(-1, *(1,) * (values.ndim - 1))
    total = counts.sum(axis=0)
    mean = (np.where(known, values, 0) * counts).sum(axis=0) / np.where(total > 0, total, 1)
    return np.where(total > 0, mean, np.nan).astype(np.float32)


def mixed_quantiles(quantiles: forward.Array, weights: forward.Array) -> forward.Array:
    """Returns the quantiles of mixtures of distributions that are known by their quantiles: float32 [E, kinds, levels].

    Meaning: the distributions are even between quantiles. A mixture's share of values up to x is the weighted mean of
             their shares; its quantile is the least x with that share.
    Args:    quantiles: float32 [P, E, kinds, levels] at `QUANTILE_LEVELS`.   weights: [P, E], not all 0 for an expert.
    """
    levels = np.asarray(statistics.QUANTILE_LEVELS)
    mixed = np.empty(quantiles.shape[1:], np.float32)
    for expert, kind in np.ndindex(mixed.shape[:2]):
        counts = weights[:, expert]
        reached = [(values, count) for values, count in zip(quantiles[:, expert, kind], counts, strict=True) if count]
        if len(reached) < 2:
            mixed[expert, kind] = reached[0][0] if reached else quantiles[0, expert, kind]
            continue
        places = np.unique(np.concatenate([values for values, _ in reached]).astype(np.float64))
        share = sum(np.interp(places, values, levels) * count for values, count in reached) / counts.sum()
        share, firsts = np.unique(share, return_index=True)
        mixed[expert, kind] = np.interp(levels, share, places[firsts])
    return mixed
