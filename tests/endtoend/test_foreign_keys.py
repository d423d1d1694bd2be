"""A key that one family knows, put into another's config: refused, or it does what it does in the original."""

import json
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import our_logits, start_token, their_answer
from support.choices import Ties
from support.families import (
    CARDS,
    REFERENCES,
    WITH_ENCODER,
    Tiny,
    built,
    leave_text,
    oracle,
    original,
    text_values,
    token_ids,
    whole_config,
    with_text,
    write_config,
    write_random,
)

from moe_pack.formats import CheckpointError, ModelSpec
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import read_spec
from moe_pack.runtime.model import CheckpointWeights

# Values beyond those of the tiny configs, for keys that these do not switch on.
MORE: dict[str, list[Any]] = {
    "head_dim": [8, 32],
    "sliding_window": [7],
    "use_sliding_window": [True],
    "max_window_layers": [1],
    "mlp_only_layers": [[1]],
    "partial_rotary_factor": [0.5],
    "original_max_position_embeddings": [16],
    "rope_theta": [77.0],
    "clip_qkv": [0.1],
    "scoring_func": ["sigmoid", "softmax"],
    "moe_layer_freq": [2],
    "num_nextn_predict_layers": [1],
}
# Sizes with which nothing runs, here or there, and keys that are the family itself.
LEFT_OUT = {"model_type", "architectures", "transformers_version", "vocab_size", "max_position_embeddings", "dtype"}
# Another spelling of these sizes; and what the class returns, which the comparison reads.
LEFT_OUT |= {"model_max_length", "max_seq_len", "return_dict"}
# With so few heads many positions score 0 in all of them, and nobody says which of equal ones an indexer takes.
TIES = (("index_n_heads", 2), ("index_n_heads", 8), ("indexer_n_heads", 2))
# transformers' Kimi delta attention is up to 1.3e-4 from its own in float64 here, ours 3.2e-5.
BOUNDS = {"bailing_hybrid": 2e-4}
FEWEST_POSITIONS = 20  # to compare before a choice that rounding tipped


def written(family: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return write_config(Tiny(family, "plain"), folder)


def write(family: str, values: dict[str, Any], folder: Path) -> None:
    """Writes a checkpoint whose tensors are those that the original makes of a config, and the config as it is."""
    from transformers import AutoConfig

    model_type, own = built(_infinite(values))
    if family in REFERENCES:
        REFERENCES[family].write(own, folder)
    else:
        write_random(whole_config(values) or AutoConfig.for_model(model_type, **own), folder)
        leave_text(family, folder)
    (folder / "config.json").write_text(json.dumps(values))


def _infinite(value: Any) -> Any:
    """A value as the config's class takes it: transformers writes an infinity as an object."""
    if type(value) is dict and value != {"__float__": "Infinity"}:
        return {key: _infinite(each) for key, each in value.items()}
    if type(value) is list:
        return [_infinite(each) for each in value]
    return float("inf") if type(value) is dict else value


def candidates(folder: Path) -> list[tuple[str, Any]]:
    """Every key of every family's config with values that are not its own."""
    found: dict[str, list[Any]] = {}
    for family in CARDS:
        for key, value in text_values(written(family, folder)).items():
            if isinstance(value, bool):
                found.setdefault(key, []).extend([True, False])
            elif isinstance(value, int | float):
                found.setdefault(key, []).extend([value, type(value)(2 if value < 16 else 16)])
    for key, values in MORE.items():
        found.setdefault(key, []).extend(values)
    return [
        (key, json.loads(value))
        for key, values in found.items()
        if key not in LEFT_OUT
        for value in sorted({json.dumps(value) for value in values})
        if (key, json.loads(value)) not in TIES
    ]


def is_same(one: object, other: object) -> bool:
    return one == other and type(one) is type(other)


def differs(family: str, values: dict[str, Any], folder: Path) -> float | None:
    """The largest difference of logits under this config, or None where either side refuses it.

    Rounding may tip a choice between equal scores, on one kind of CPU, and everything after it differs. If our scores
    are that close where the logits begin to differ, the positions before are compared, and another text as a whole.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        read_spec(Config(values, "config.json"))
        write(family, values, folder / "source")
    except (CheckpointError, StrictDataclassError, ValueError, TypeError, RuntimeError):
        return None
    ids, bound, worst = token_ids()[:60], BOUNDS.get(family, 1e-4), 0.0
    for text in (ids, ids[::-1], ids[30:] + ids[:30]):
        found = differs_on(family, folder, text)
        if found is None:
            return None
        differences, tied = found
        first = next((place for place, each in enumerate(differences) if not each < bound), len(differences))
        if first == len(differences) or first < FEWEST_POSITIONS or not tied[first]:
            return max(worst, *differences)
        worst = max(worst, *differences[:first])
    raise AssertionError(f"{family}: scores are tied in each text")


def differs_on(family: str, folder: Path, ids: list[int]) -> tuple[list[float], list[bool]] | None:
    """The largest difference of logits at each position, and whether a choice of ours is close there."""
    try:
        ties = Ties()
        with closing(Checkpoint(folder / "source")) as checkpoint, torch.no_grad(), ties.noted():
            logits = our_logits(CheckpointWeights(checkpoint), ids)
    except CheckpointError:  # the tensors are not those that our reading of the config asks for
        return None
    with torch.no_grad():
        if family in WITH_ENCODER:
            model = original(folder / "source")
            expected = their_answer(model, ids, [start_token(model), *ids[: len(ids) // 2]])
        else:
            try:
                expected = oracle(folder / "source")(ids)
            except (RuntimeError, ValueError) as error:
                # Heads that images' positions, which texts do not have, cannot share; and what training alone uses.
                if "split_sizes" in str(error) or "dropout probability" in str(error):
                    return None
                raise
    return (logits - expected).abs().amax(dim=1).tolist(), ties.by_position(len(logits))


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Any]]:
    return candidates(tmp_path_factory.mktemp("all"))


def together(alike: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Changes in as few configs as can have them: those of one key are in different ones."""
    configs: list[dict[str, Any]] = []
    for key, value in alike:
        config = next((each for each in configs if key not in each), None)
        if config is None:
            configs.append(config := {})
        config[key] = value
    return configs


def spec_or_none(values: dict[str, Any]) -> ModelSpec | None:
    try:
        return read_spec(Config(values, "config.json"))
    except CheckpointError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("family", CARDS)
def test_a_foreign_key_is_refused_or_means_what_it_means_to_the_original(
    family: str, changes: list[tuple[str, Any]], tmp_path: Path
) -> None:
    whole = written(family, tmp_path / "own")
    own, spec = text_values(whole), spec_or_none(whole)
    folders = (tmp_path / str(number) for number in count())

    def compared(change: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
        """Differences under a change; under each part of it, where one of them is refused or means something."""
        difference = differs(family, with_text(whole, own | change), next(folders))
        if (difference is None or not difference < BOUNDS.get(family, 1e-4)) and len(change) > 1:
            return [pair for key, value in change.items() for pair in compared({key: value})]
        return [] if difference is None else [(change, difference)]

    foreign = [(key, value) for key, value in changes if not (key in own and is_same(own[key], value))]
    read = {number: spec_or_none(with_text(whole, own | {key: value})) for number, (key, value) in enumerate(foreign)}
    # What changes nothing to our reader is tried in few configs with many such keys, all else alone.
    alone = [{key: value} for number, (key, value) in enumerate(foreign) if read[number] not in (None, spec)]
    alike = together([change for number, change in enumerate(foreign) if read[number] == spec])
    found = [pair for change in [*alone, *alike] for pair in compared(change)]
    assert not [pair for pair in found if not pair[1] < BOUNDS.get(family, 1e-4)]
    assert sum(len(change) for change, _ in found) > 10, "some change is understood on both sides"
