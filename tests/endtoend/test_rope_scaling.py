"""Each family runs each scaling of rotary positions that transformers runs for it, with the same logits."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.cards import ALL_SCALINGS, Values
from support.cases import case
from support.families import CARDS, ROTARY, Tiny, original, text_values, token_ids, with_text, write

from moe_pack.formats import CheckpointError, ModelSpec
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.parts import LatentSpec
from moe_pack.runtime.model import CheckpointWeights, Decoder

# Of the original context, and of the text: shorter and longer than that.
ORIGINAL, POSITIONS, LENGTHS = 32, 128, (20, 72)
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")


def scaling_of(kind: str, pairs: int) -> Values:
    """The keys of a scaling of heads with so many pairs that are rotated."""
    keys: dict[str, Values] = {
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        "longrope": {
            "short_factor": [1.0 + 0.2 * pair for pair in range(pairs)],
            "long_factor": [1.5 + 2.0 * pair for pair in range(pairs)],
            "original_max_position_embeddings": ORIGINAL,
        },
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
    }
    return {"rope_type": kind} | keys[kind]


def rescale(folder: Path, values: Values, kind: str) -> None:
    """Writes the config.json of a checkpoint with scaled positions, in place of those of `values`, which it has."""
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    checkpoint = Checkpoint(folder)
    spec = checkpoint.spec
    checkpoint.close()
    text = dict(text_values(values))
    for key in {"max_position_embeddings", "max_seq_len", "model_max_length"} & set(text):
        text[key] = ORIGINAL if kind == "dynamic" else POSITIONS
    if "head_dim" in text and text["head_dim"] is None:  # with which transformers has no yarn
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    text["rope_parameters"] = _scaled(text["rope_parameters"], kind, spec)
    path.write_text(json.dumps(with_text(values, text)))


def _scaled(parameters: Values, kind: str, spec: ModelSpec) -> Values:
    if "rope_theta" in parameters:
        return _unscaled(parameters) | scaling_of(kind, spec.rotation.rotary_dim // 2)
    sizes = {
        rope.theta: attention.head_dim
        for attention, rope in spec.attention_kinds
        if rope is not None and not isinstance(attention, LatentSpec)
    }
    scaled: Values = {}
    for key, inner in parameters.items():
        if not isinstance(inner, dict):  # of layers that do not rotate
            scaled[key] = inner
            continue
        kept = _unscaled(inner)
        size = int(sizes[kept["rope_theta"]] * kept.get("partial_rotary_factor", 1.0))
        scaled[key] = kept | scaling_of(kind, size // 2)
    return scaled


def _unscaled(parameters: Values) -> Values:
    if parameters["rope_type"] == "proportional":  # of heads that rotate as a whole
        return {"rope_theta": parameters["rope_theta"]}
    return {key: value for key, value in parameters.items() if key in _KEPT}


TOLERANCE = 2e-4
# Heads that rotate as a whole or in part, latent attention, positions of each kind of layer, unit norms after rotation.
FEW = ("mixtral", "deepseek_v3", "glm4_moe", "laguna", "llama4_text")
Folder = Callable[[], Path]


@torch.no_grad()
def by_transformers(folder: Path, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = original(folder)(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def decoder_of(checkpoint: Checkpoint) -> Decoder:
    return Decoder(CheckpointWeights(checkpoint), LENGTHS[-1])


def compare_kinds(family: str, folder: Path) -> None:
    """Compares each scaling before and beyond the original context, and that it is another model there."""
    write(Tiny(family, "as it comes"), folder)
    values = json.loads((folder / "config.json").read_text())
    unscaled, ids = by_transformers(folder, token_ids()[: LENGTHS[-1]]), token_ids()
    card = CARDS[family]
    for kind in ALL_SCALINGS:
        if kind in (*card.not_run, *card.refused_scalings):
            continue
        with case(family, kind):
            rescale(folder, values, kind)
            checkpoint = Checkpoint(folder)
            decoder = decoder_of(checkpoint)
            model = original(folder)
            for length in LENGTHS:
                decoder.reset()
                with torch.no_grad():
                    expected = model(torch.tensor([ids[:length]]), use_cache=False).logits[0]
                bound = TOLERANCE * float(expected.abs().max())
                assert (decoder.logits(ids[:length]) - expected).abs().max() < bound
            checkpoint.close()
            assert (expected - unscaled).abs().max() > 10 * bound, "a scaling that changes nothing proves nothing"


def test_scaled_positions_are_those_of_transformers(new_folder: Folder) -> None:
    for family in FEW:
        compare_kinds(family, new_folder())


@pytest.mark.slow
def test_scaled_positions_of_all_other_families_are_those_of_transformers(new_folder: Folder) -> None:
    for family in ROTARY:
        if family not in FEW:
            compare_kinds(family, new_folder())


@pytest.mark.slow
def test_scalings_that_a_family_lacks_are_refused(new_folder: Folder) -> None:
    for family in (family for family, card in CARDS.items() if card.refused_scalings):
        folder = write(Tiny(family, "as it comes"), new_folder())
        values = json.loads((folder / "config.json").read_text())
        for kind in CARDS[family].refused_scalings:
            with case(family, kind):
                rescale(folder, values, kind)
                with pytest.raises(CheckpointError, match=r"longrope nor dynamic|expected at least rotary_dim"):
                    Checkpoint(folder)


def test_the_config_of_a_merge_of_llamas_is_taken(tmp_path: Path) -> None:
    """Mergekit's keys of Llama 3.1 (bands) and of DeepSeek-Coder (linear), in the keys of transformers 4."""
    bands = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scalings = (
        {"rope_type": "llama3"} | bands,
        {"type": "llama3", "rope_type": "llama3"} | bands,
        {"type": "linear", "factor": 4.0},
    )
    folder = write(Tiny("mixtral", "of transformers 4", four=True), tmp_path)
    values = json.loads((folder / "config.json").read_text())
    ids = token_ids()
    unscaled = by_transformers(folder, ids)
    for scaling in scalings:
        with case(scaling):
            changed = {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 131_072}
            (folder / "config.json").write_text(json.dumps(values | changed))
            checkpoint = Checkpoint(folder)
            found = Decoder(CheckpointWeights(checkpoint), len(ids)).logits(ids)
            checkpoint.close()
            expected = by_transformers(folder, ids)
            assert (found - expected).abs().max() < TOLERANCE < (found - unscaled).abs().max()


# ---- dynamic scaling: the length of the text counts ------------------------------------------------------------------


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    """A checkpoint with dynamic scaling beyond `ORIGINAL` positions."""
    folder = write(Tiny("qwen3_moe", "as it comes"), tmp_path)
    rescale(folder, json.loads((folder / "config.json").read_text()), "dynamic")
    return folder


@torch.no_grad()
def cached(folder: Path, pieces: Sequence[list[int]]) -> torch.Tensor:
    """The logits of a text whose pieces are given one after the other to transformers, which keeps its keys."""
    model, past, found = original(folder), None, []
    for piece in pieces:
        output = model(torch.tensor([piece]), past_key_values=past, use_cache=True)
        past = output.past_key_values
        found.append(output.logits[0])
    return torch.cat(found)


def test_tokens_that_are_given_together_have_the_base_of_their_length_and_earlier_keys_stay(dynamic: Path) -> None:
    ids, checkpoint = token_ids()[: LENGTHS[-1]], Checkpoint(dynamic)
    decoder = decoder_of(checkpoint)
    for first in (1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 50):
        with case(first):
            pieces = [ids[:first], *([token] for token in ids[first : first + 8]), ids[first + 8 :]]
            decoder.reset()
            found = torch.cat([decoder.logits(piece) for piece in pieces])
            assert (found - cached(dynamic, pieces)).abs().max() < TOLERANCE
    checkpoint.close()


def test_a_prompt_in_chunks_is_a_prompt_at_once(dynamic: Path) -> None:
    ids, checkpoint = token_ids()[: LENGTHS[-1]], Checkpoint(dynamic)
    chunked = Decoder(CheckpointWeights(checkpoint), len(ids), chunk_tokens=7).logits(ids)
    checkpoint.close()
    assert (chunked - by_transformers(dynamic, ids)).abs().max() < TOLERANCE


def test_the_answer_to_a_prompt_does_not_depend_on_what_ran_before(dynamic: Path) -> None:
    """Within the original context keys stay; beyond it, they have a base of another length."""
    ids, checkpoint = token_ids()[: LENGTHS[-1]], Checkpoint(dynamic)
    for before, prompt, is_kept in ((20, 30, True), (20, ORIGINAL + 1, False), (50, 30, False), (50, 60, False)):
        with case(before, prompt):
            decoder = decoder_of(checkpoint)
            decoder.logits(ids[: before - 2])
            decoder.logits([ids[before - 2]])
            decoder.logits([ids[before - 1]])
            left = decoder.keep_beginning(list(ids[:prompt]))
            assert (len(left) < prompt) == is_kept
            found = decoder.logits(list(left))
            assert (found[-1] - by_transformers(dynamic, ids[:prompt])[-1]).abs().max() < TOLERANCE
    checkpoint.close()


def test_a_text_that_grows_beyond_longrope_s_context_has_the_logits_of_the_text_at_once(tmp_path: Path) -> None:
    folder = write(Tiny("qwen3_moe", "as it comes"), tmp_path)
    rescale(folder, json.loads((folder / "config.json").read_text()), "longrope")
    ids, checkpoint = token_ids()[: LENGTHS[-1]], Checkpoint(folder)
    decoder = decoder_of(checkpoint)
    decoder.logits(ids[: ORIGINAL - 1])
    for length in range(ORIGINAL, ORIGINAL + 4):
        found = decoder.logits([ids[length - 1]])
        assert (found[-1] - by_transformers(folder, ids[:length])[-1]).abs().max() < TOLERANCE
    checkpoint.close()
