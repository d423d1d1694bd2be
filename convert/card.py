"""The model card of packs on the hub: metadata, and a section for each pack with what was measured of it.

A card that exists is kept: metadata that it has stays, and only the pack's own section, between two marks, is replaced.
The card says nothing that is not known: without `quality.json` the loss is "not measured".
"""

import re
from dataclasses import dataclass
from typing import Any

from moe_pack import formats
from moe_pack.formats.hub import HubName
from moe_pack.runtime.quality import Estimate, Quality, bits_per_weight, read_quality

CARD_FILE = "README.md"
_TAGS = ("moe-pack", "mixture-of-experts")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the pack itself does not say.

    `base_model`, `license`: of the checkpoint, None if unknown.   `command`: which made the pack; None if unknown.
    `budget`: a memory in which the pack runs, as an option takes it; None to leave it out.
    """

    base_model: str | None = None
    license: str | None = None
    command: str | None = None
    budget: str | None = None


def card_text(old: str | None, pack: formats.Pack, name: HubName, facts: CardFacts) -> str:
    """Returns the card of a repository with a pack's section.

    Args:    old: the card that the repository has, if any.   name: under which the pack will be found.
    """
    from huggingface_hub import ModelCard, ModelCardData

    title = f"# {name.repository.partition('/')[2]}"
    new = f"---\nlibrary_name: moe-pack\n---\n\n{title}\n"
    card = ModelCard(new if old is None else old, ignore_metadata_errors=True)
    known: dict[str, Any] = card.data.to_dict()  # type: ignore[no-untyped-call]  # the client leaves it out
    metadata = _metadata(known, facts)
    begin, end = f"<!-- moe-pack begin {name.variant} -->", f"<!-- moe-pack end {name.variant} -->"
    section = f"{begin}\n{_section(pack, name, facts)}\n{end}"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text, num_replaced = pattern.subn(lambda _: section, card.text, count=1)
    if not num_replaced:
        text = f"{card.text.rstrip()}\n\n{section}\n"
    return f"---\n{ModelCardData(**metadata).to_yaml()}\n---\n{text if text.startswith(chr(10)) else chr(10) + text}"


def _metadata(known: dict[str, Any], facts: CardFacts) -> dict[str, Any]:
    """Returns the card's metadata: what is known stays, what is missing is added."""
    added: dict[str, Any] = {"library_name": "moe-pack", "pipeline_tag": "text-generation"}
    if facts.base_model is not None:
        added |= {"base_model": facts.base_model, "base_model_relation": "quantized"}
    if facts.license is not None:
        added["license"] = facts.license
    tags = known.get("tags") or []
    return {**added, **known, "tags": [*tags, *(tag for tag in _TAGS if tag not in tags)]}


def _section(pack: formats.Pack, name: HubName, facts: CardFacts) -> str:
    spec, manifest = pack.spec, pack.manifest
    title = f"## {name.variant}" if name.variant else "## The pack"
    source = "" if facts.base_model is None else f" of [{facts.base_model}](https://huggingface.co/{facts.base_model})"
    rows = [
        ("model", f"{spec.family}, {len(spec.moe_layers)} MoE layers of {spec.router.num_experts} experts"),
        ("size", formats.size_text(manifest.totals.content)),
        ("bits of an expert weight", f"{bits_per_weight(pack):.2f}"),
        ("selector, quantizer", f"{manifest.selector}, {manifest.quantizer}"),
        *([] if facts.budget is None else [("budget", facts.budget)]),
        *_quality_rows(read_quality(pack)),
        ("root digest", f"`{manifest.root}`"),
    ]
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)])
    made = "" if facts.command is None else f"Made with:\n\n```\n{facts.command}\n```\n\n"
    budget = "" if facts.budget is None else f" --budget {facts.budget}"
    run = f'pip install "moe-pack[hub]"\nmoe-run {name.text()}{budget} --prompt "It was a dark night"'
    return f"{title}\n\nA pack of moe-pack{source}.\n\n{table}\n\n{made}Run it:\n\n```\n{run}\n```"


def _quality_rows(quality: Quality | None) -> list[tuple[str, str]]:
    """Returns the measured loss as rows of the table."""
    if quality is None:
        return [("loss", "not measured")]
    text = f"{quality.num_tokens:,} tokens of {quality.text}"
    rows = [("perplexity", f"{_estimate(quality.perplexity)} on {text}")]
    against = quality.against
    if against is None:
        return [*rows, ("KL divergence from the source", "not measured")]
    return [
        *rows,
        ("perplexity of the source", _estimate(against.source_perplexity)),
        ("KL divergence from the source", f"{_estimate(against.kl, 5)} nats a token"),
        ("same likeliest token", f"{against.agreement.value:.1%}"),
    ]


def _estimate(estimate: Estimate, digits: int = 3) -> str:
    half = "" if estimate.half_width is None else f" ± {estimate.half_width:.{digits}f} (95%)"
    return f"{estimate.value:.{digits}f}{half}"
