"""Tiny random checkpoints of every family, made and run by transformers, or by a plain reference where it has no class.

What is particular to a family stands in its card, in tests/families. tests/endtoend/test_families.py and
`make families` run every shape of every card.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from moe_pack.formats import ModelSpec, Pack
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import all_families, modules, read_spec
from moe_pack.runtime import Sampler, SamplingOptions
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import Decoder, EncoderDecoder, PackWeights
from support.answers import is_greedy, start_token, their_answer, their_logits_one_by_one
from support.cards import Card, Values, with_old_keys
from support.models import pack

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Oracle = Callable[[list[int]], torch.Tensor]
NUM_TOKENS, NUM_GREEDY, NUM_POSITIONS = 96, 32, 128
SIZES: Values = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": NUM_POSITIONS,
}
SMALL: Values = SIZES | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
# Every family's card, from the file in tests/families that is named as the family's module.
CARDS: dict[str, Card] = {
    family: card for module in modules() for family, card in import_module(f"families.{module}").CARDS.items()
}


@dataclass(frozen=True)
class Tiny:
    """One shape of a family."""

    family: str
    name: str
    config: Values = field(default_factory=dict)  # beyond the card's
    # Families with a reference have neither: one spelling is all that is published.
    fused: bool = False  # experts are stored as transformers 5 holds them in memory
    four: bool = False  # the config is rewritten as transformers 4 wrote it

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


REFERENCES = {family: card.reference for family, card in CARDS.items() if card.reference is not None}
IN_TRANSFORMERS = tuple(  # those whose config is as transformers writes it
    family for family, card in CARDS.items() if card.reference is None and card.written is None
)
WITH_ENCODER = tuple(family for family, card in CARDS.items() if card.has_encoder)
ROTARY = tuple(family for family in IN_TRANSFORMERS if CARDS[family].rope != "none" and not CARDS[family].has_encoder)
TEXT_KEYS = {family.model_type: family.text_keys for family in all_families()}
TINY: tuple[Tiny, ...] = (
    *(Tiny(family, "as it comes") for family in CARDS),
    *(
        Tiny(family, "experts fused", fused=True)
        for family in IN_TRANSFORMERS
        if not CARDS[family].has_encoder and family != "kimi_linear"  # which are stored apart anyway
    ),
    *(Tiny(family, "config of transformers 4", four=True) for family in IN_TRANSFORMERS),
    *(Tiny(family, name, shape) for family, card in CARDS.items() for name, shape in card.shapes.items()),
)


def quiet_transformers() -> None:
    """Turns off what transformers prints; it is imported where it is used, for it takes seconds."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped in transformers
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers


def config_of(tiny: Tiny) -> PreTrainedConfig:
    """transformers' config of a row."""
    from transformers import AutoConfig

    quiet_transformers()
    card = CARDS[tiny.family]
    values = (SMALL if card.small else {}) | card.config | tiny.config
    family = card.text_of or tiny.family
    if (around := CARDS[family].around) is not None:
        values = around.config(values)
    config: PreTrainedConfig = AutoConfig.for_model(CARDS[family].built_as or family, **values)
    return config


def text_values(values: Values) -> Values:
    """The part of a config that describes the text model: all of it, unless it is multimodal."""
    for key in TEXT_KEYS[values["model_type"]]:
        values = values[key]
    return values


def with_text(values: Values, text: Values) -> Values:
    """The config with another text model."""
    path, inner = TEXT_KEYS[values["model_type"]], [values]
    for key in path:
        inner.append(inner[-1][key])
    for key, outer in zip(reversed(path), reversed(inner[:-1]), strict=True):
        text = outer | {key: text}
    return text


def write_config(tiny: Tiny, folder: Path) -> Values:
    """Writes the config.json of a row, and returns its values; a reference's has its class's defaults written out."""
    if tiny.family in REFERENCES:
        values = REFERENCES[tiny.family].completed(reference_config(tiny)) | {"model_type": tiny.family}
        (folder / "config.json").write_text(json.dumps(values))
        return values
    config_of(tiny).save_pretrained(folder)
    return named(tiny.family, folder)


def specs_of_shapes() -> dict[str, list[ModelSpec]]:
    """Returns the specs of all shapes of each family."""
    found: dict[str, list[ModelSpec]] = {}
    for tiny in TINY:
        with TemporaryDirectory() as folder:
            values = write_config(tiny, Path(folder))
        found.setdefault(tiny.family, []).append(read_spec(Config(values, "config.json"))[1])
    return found


def reference_config(tiny: Tiny) -> Values:
    """The config of a row of a family with a reference."""
    return SIZES | {"num_key_value_heads": 2} | CARDS[tiny.family].config | tiny.config


def named(family: str, folder: Path) -> Values:
    """Rewrites a config.json of transformers and its tensors as those of a family; returns the values."""
    leave_text(family, folder)
    path, written = folder / "config.json", CARDS[family].written
    values: Values = json.loads(path.read_text())
    values = (values if written is None else written(values)) | {"model_type": family}
    path.write_text(json.dumps(values))
    return values


def leave_text(family: str, folder: Path) -> None:
    """Makes of a multimodal checkpoint, or of its config alone, that of its text model, if this is such a family."""
    whole = CARDS[family].text_of
    if not whole:
        return
    path = folder / "config.json"
    path.write_text(json.dumps(text_config(family, json.loads(path.read_text()))))
    path, around = folder / "model.safetensors", CARDS[whole].around
    assert around is not None
    if path.exists():
        tensors = {
            name.replace("model.language_model.", "model."): tensor
            for name, tensor in load_file(path).items()
            if not name.startswith(around.names)
        }
        save_file(tensors, path, {"format": "pt"})


def text_config(family: str, values: Values) -> Values:
    """The config of a text model that transformers has inside a multimodal one; any other config as it is."""
    text: Values = values.get("text_config", values) if CARDS[family].text_of else values
    return text


def built(values: Values) -> tuple[str, Values]:
    """The type and the values with which transformers makes the config of a checkpoint whose config.json has these."""
    card = CARDS[values["model_type"]]
    own = {key: value for key, value in values.items() if key != "model_type"}
    return card.built_as or values["model_type"], own if card.read is None else card.read(own)


def class_config(values: Values, folder: Path) -> PreTrainedConfig | None:
    """The config with which the class loads the checkpoint in a folder, or None if it reads config.json itself."""
    from transformers import CONFIG_MAPPING

    card = CARDS[values["model_type"]]
    if card.text_of:
        return whole_config(values)
    if not card.built_as:
        return None
    model_type, of_class = built(values)
    config: PreTrainedConfig
    if card.read is not None:
        config = CONFIG_MAPPING[model_type](**of_class)
    else:
        config = CONFIG_MAPPING[model_type].from_pretrained(folder)
        setattr(config, "model_type", model_type)  # noqa: B010  # to transformers' types it is the class's alone
    return config


def whole_config(values: Values) -> PreTrainedConfig | None:
    """The multimodal config around the values of such a text model; None for any other model."""
    from transformers import AutoConfig

    whole = CARDS[values["model_type"]].text_of
    if not whole:
        return None
    around = CARDS[whole].around
    assert around is not None
    config: PreTrainedConfig = AutoConfig.for_model(whole, **around.config(values))
    return config


def write(tiny: Tiny, folder: Path) -> Path:
    """Writes the checkpoint of a row."""
    if tiny.family in REFERENCES:
        assert not tiny.fused and not tiny.four, "one spelling is all that is published"
        return REFERENCES[tiny.family].write(reference_config(tiny), folder)
    write_random(config_of(tiny), folder, tiny.fused)
    values = named(tiny.family, folder)
    if tiny.four:
        four = with_text(values, as_transformers_4(tiny.family, text_values(values)))
        (folder / "config.json").write_text(json.dumps(four))
    return folder


def write_random(config: PreTrainedConfig, folder: Path, fused: bool = False) -> None:
    """Writes a checkpoint of random bfloat16 weights, none of which leaves a path unused or overwhelms another."""
    quiet_transformers()
    torch.manual_seed(7)
    model = class_of(config.model_type).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "sinks", ".base", ".hc_base")):
                weight.normal_(std=0.2)
            elif name.endswith("tid2eid"):
                # different experts for each token
                weight.copy_(torch.rand(len(weight), config.n_routed_experts).argsort(dim=1)[:, : weight.shape[1]])
            elif name.endswith("A_log"):
                weight.uniform_(-4, -1)  # states remember tens of tokens: what they give is no small rest of sums
            elif weight.ndim == 1 and re.search(r"(_hc|hc_head)\.\w+$", name):
                weight.uniform_(0.5, 1.5)  # of hyper-connections, which begin nearly without an effect
            elif weight.ndim == 1 and "norm" in name:
                usual = 0.0 if not weight.any() else 1.0  # zero-centered norms begin with zeros
                weight.uniform_(usual - 0.5, usual + 0.5)
            elif weight.ndim > 1 and weight.is_floating_point():
                weight.normal_(std=0.15)
        if config.is_encoder_decoder:  # transformers 5 takes them apart where the head is not tied
            for stack in (model.encoder, model.decoder):
                stack.embed_tokens.weight.copy_(model.shared.weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values")  # angles of llama4's vision part, which is not run
        model.to(torch.bfloat16)
    model.save_pretrained(folder, save_original_format=not fused)


def class_of(model_type: str) -> Any:
    """The class of transformers that makes models of this kind."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    card = CARDS[model_type]
    if card.around is not None or card.is_part:
        return AutoModelForMultimodalLM
    return AutoModelForSeq2SeqLM if card.has_encoder else AutoModelForCausalLM


def as_transformers_4(family: str, values: Values) -> Values:
    """A text model's config as version 4 spelled it."""
    card = CARDS[family]
    if card.old is not None:
        return card.old(values)
    if card.rope == "by kind":  # which version 4 did not have
        return {key: value for key, value in values.items() if key != "dtype"} | {"torch_dtype": values.get("dtype")}
    return with_old_keys(values, keeps_kinds=card.rope == "none")


def is_with_encoder(folder: Path) -> bool:
    """Whether the checkpoint is of a model with an encoder."""
    return CARDS[json.loads((folder / "config.json").read_text())["model_type"]].has_encoder


def original(folder: Path) -> PreTrainedModel:
    """The checkpoint in transformers, float32."""
    quiet_transformers()
    values = json.loads((folder / "config.json").read_text())
    card = CARDS[values["model_type"]]
    kind = class_of(card.text_of or values["model_type"])
    model: PreTrainedModel = kind.from_pretrained(folder, config=class_config(values, folder), dtype=torch.float32)
    model = getattr(model, "thinker", model)  # the whole of qwen3_omni_moe has no logits, only its thinker
    model.train(False)
    if card.correct is not None:
        card.correct(model)
    return model


def oracle(folder: Path) -> Oracle:
    """What says the logits of a text, float32 [T, vocab], by the checkpoint in a folder."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    if family in REFERENCES:
        return partial(REFERENCES[family].logits_of, folder)
    model = original(folder)

    def by_transformers(ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits

    return by_transformers


@dataclass(frozen=True)
class Comparison:
    """Largest differences from the oracle's logits, and whether greedy text is the same."""

    prefill: float
    token_by_token: float
    greedy_equal: bool
    largest_logit: float


def token_ids() -> list[int]:
    """Tokens that use most of the vocabulary, in no simple order."""
    return [(11 * i * i + 5 * i + 3) % SMALL["vocab_size"] for i in range(NUM_TOKENS)]


@torch.no_grad()
def compare(tiny: Tiny, folder: Path) -> Comparison:
    """Makes the checkpoint, packs it in 16 bit, and runs both, past every window and scaling limit.

    Token by token, what counts is what the oracle says of the text so far: a row of what it says of the whole text,
    but for longrope, which looks at the length.
    """
    source = write(tiny, folder / "source")
    pack(source, folder / "packed", width=16)
    ids = token_ids()
    if is_with_encoder(source):
        return compare_answers(original(source), ids, folder / "packed")
    reference = oracle(source)
    steps = whole = reference(ids)
    is_by_length = '"longrope"' in (source / "config.json").read_text()
    if is_by_length:
        steps = torch.stack([reference(ids[: n + 1])[-1] for n in range(NUM_TOKENS)])
    with Pack(folder / "packed") as opened:
        decoder = Decoder(PackWeights(opened, torch.device("cpu")), NUM_POSITIONS)
        prefill = decoder.logits(ids)
        decoder.reset()
        one_by_one = torch.stack([decoder.next_logits([token]) for token in ids])
        decoder.reset()
        made = list(generate(decoder, ids[:24], Sampler(SamplingOptions(temperature=0)), NUM_GREEDY, frozenset()))
    text = [*ids[:24], *made]
    before = reference(text)[23:-1]
    if is_by_length:
        before = torch.stack([reference(text[:n])[-1] for n in range(24, len(text))])
    return Comparison(
        prefill=float((prefill - whole).abs().max()),
        token_by_token=float((one_by_one - steps).abs().max()),
        greedy_equal=is_greedy(made, before) and len(made) == NUM_GREEDY,
        largest_logit=float(whole.abs().max()),
    )


@torch.no_grad()
def briefly_differs(tiny: Tiny, folder: Path) -> float:
    """The largest difference of logits in a chunk of two thirds of the text and, one by one, in the tokens after it."""
    source = write(tiny, folder / "source")
    pack(source, folder / "packed", width=16)
    ids, begin = token_ids(), 2 * NUM_TOKENS // 3
    expected = oracle(source)(ids)
    assert expected.abs().max() > 0.5, "logits so small that the bound would prove nothing"
    with Pack(folder / "packed") as opened:
        decoder = Decoder(PackWeights(opened, torch.device("cpu")), NUM_POSITIONS)
        chunk = decoder.logits(ids[:begin])
        one_by_one = [decoder.next_logits([token]) for token in ids[begin:]]
    return float((torch.cat((chunk, torch.stack(one_by_one))) - expected).abs().max())


def compare_answers(model: PreTrainedModel, text: list[int], packed: Path) -> Comparison:
    """The same for a model with an encoder: a text, and an answer that is given, or made."""
    answer = [start_token(model), *text[20:80]]
    expected, steps = their_answer(model, text, answer), their_logits_one_by_one(model, text, answer)
    with Pack(packed) as opened:
        runs = EncoderDecoder(PackWeights(opened, torch.device("cpu")), NUM_POSITIONS)
        runs.encode(text)
        prefill = runs.logits(answer)
        runs.encode(text)
        one_by_one = torch.stack([runs.next_logits([token]) for token in answer])
        made = list(generate(runs, text, Sampler(SamplingOptions(temperature=0)), NUM_GREEDY, frozenset()))
    before = their_logits_one_by_one(model, text, [start_token(model), *made[:-1]])
    return Comparison(
        prefill=float((prefill - expected).abs().max()),
        token_by_token=float((one_by_one - steps).abs().max()),
        greedy_equal=is_greedy(made, before) and len(made) == NUM_GREEDY,
        largest_logit=float(expected.abs().max()),
    )


def is_bounded(comparison: Comparison, tolerance: float) -> bool:
    """Whether logits stay within `tolerance` and text is equal; a NaN is no agreement."""
    worst = max(comparison.prefill, comparison.token_by_token)
    return math.isfinite(worst) and worst < tolerance and comparison.greedy_equal
