"""Checks of a finished pack: is it whole, is it of its source, and does it keep the limits that were set.

A check that fails says what was found and what was allowed; one that cannot be made is skipped, with the reason.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moe_pack.calib import Estimate, Quality, check_source
from moe_pack.convert.account import totals
from moe_pack.convert.compare import same_tensors
from moe_pack.formats import (
    NO_PROGRESS,
    SOURCE_FILE,
    Checkpoint,
    Pack,
    PackError,
    PlanError,
    Progress,
    RunError,
    audit,
    num_parameters,
    option,
    read_account,
    read_size,
    size_text,
)
from moe_pack.runtime import divide_budget, expert_pages, routing_bytes

_USUAL_CONTEXT = 4096  # tokens, where the model has as many positions: what moe-run takes
_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML 1.0 cannot hold

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check, and how it came out, for people."""

    name: str
    status: Status
    found: str
    allowed: str = ""


def _percentage(text: str) -> float:
    """Returns the share that `1%` stands for.

    Raises:  ValueError if it is no percentage from 0 up.
    """
    try:
        found = float(text.removesuffix("%")) / 100
    except ValueError:
        found = -1.0
    if not text.endswith("%") or not 0 <= found < float("inf"):
        raise ValueError(f"found {text!r}, expected a percentage such as 1% or 0.5%")
    return found


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pack may lose, weigh and need; None: no limit. `max_ppl_increase` is relative, 0.01 for 1%."""

    max_kl: float | None = field(
        default=None,
        metadata=option("--max-kl", least=0, metavar="X", help="KL divergence from the source, in nats a token."),
    )
    max_ppl_increase: float | None = field(
        default=None,
        metadata=option(
            "--max-ppl-increase", parse=_percentage, metavar="P%", help="Perplexity above the source's: 1%."
        ),
    )
    max_bytes: int | None = field(
        default=None,
        metadata=option("--max-bytes", parse=read_size, metavar="B", help="Bytes of the pack, such as 26G."),
    )
    budget_bytes: int | None = field(
        default=None,
        metadata=option("--budget", parse=read_size, metavar="SIZE", help="Memory that it must run in, such as 11G."),
    )

    @property
    def of_loss(self) -> bool:
        """Whether loss has to be known."""
        return self.max_kl is not None or self.max_ppl_increase is not None


def opened(folder: Path) -> tuple[Pack | None, Check]:
    """The pack, the caller's to close, and the check of its schema; None if it is no sound pack."""
    try:
        pack = Pack(folder)
    except PackError as fault:
        return None, Check("schema", "failed", str(fault), "a sound pack")
    manifest = pack.manifest
    listed = f"format {manifest.version}, {len(manifest.files) + len(manifest.expert_files)} files"
    return pack, Check("schema", "passed", listed, "a sound pack")


def digests(pack: Pack, progress: Progress = NO_PROGRESS) -> Check:
    """Whether every byte is the one that was written."""

    def work() -> str:
        audit(pack, progress)
        return f"{pack.manifest.totals.content:,} bytes, root {pack.manifest.root[:16]}"

    return _faultless("digests", "as written", work)


def tensors(pack: Pack, checkpoint: Checkpoint | None) -> Check:
    """Whether every tensor of the source is accounted for, and every byte of the pack.

    Meaning: the weights that `source.json` says were packed or kept are as many as the model has; what was dropped has
             a reason; bytes by part are those of the layout. With the checkpoint: it has these tensors and routers.
    """
    if pack.is_synthetic:
        return Check("tensors", "skipped", "a synthetic pack is made of no checkpoint")

    def work() -> str:
        if checkpoint is not None:
            same_tensors(pack, checkpoint)
            check_source(pack, checkpoint)
        return _accounted(pack)

    return _faultless("tensors", "as in the source" if checkpoint else "all accounted for", work)


def _accounted(pack: Pack) -> str:
    held = read_account(pack.read_file(SOURCE_FILE).tobytes()).tensors
    kept = sum(tensor.num_weights for tensor in held)
    if kept != num_parameters(pack.spec):
        raise PackError(
            f"{SOURCE_FILE}: found {kept:,} weights packed and resident, the model has {num_parameters(pack.spec):,}"
        )
    unexplained = [tensor.name for tensor in held if (tensor.fate in ("unused", "dropped")) != bool(tensor.reason)]
    if unexplained:
        raise PackError(f"{SOURCE_FILE}: tensor {unexplained[0]!r}: left out without a reason, or run with one")
    if totals(pack.layout, pack.manifest.files) != pack.manifest.totals:
        raise PackError("manifest.json: totals are not those of the files")
    counts = {fate: sum(tensor.fate == fate for tensor in held) for fate in ("unused", "dropped")}
    return f"{len(held)} tensors, {kept:,} weights" + "".join(
        f"; {number} tensors {fate}" for fate, number in counts.items() if number
    )


def losses(quality: Quality | None, limits: Limits, where: str) -> list[Check]:
    """Whether loss is within limits: an estimate plus the half-width of its 95% interval.

    Args:    where: what `quality` is from; without one, why there is none.
    """
    beside = None if quality is None else quality.against
    if beside is None:
        return [Check(name, "skipped", where) for name in ("kl", "perplexity")]
    return [
        _within("kl", beside.kl, limits.max_kl, lambda x: f"{x:.4g}", " nats", where),
        _within("perplexity", beside.perplexity_increase, limits.max_ppl_increase, lambda x: f"{x:+.3%}", "", where),
    ]


def _within(
    name: str, found: Estimate, allowed: float | None, text: Callable[[float], str], unit: str, where: str
) -> Check:
    if found.upper is None or found.half_width is None:
        words = f"{text(found.value)}{unit}; too few tokens for an interval ({where})"
    else:
        words = f"{text(found.value)}{unit}, at 95% up to {text(found.upper)} ({where})"
    if allowed is None:
        return Check(name, "skipped", words, "no limit")
    held = found.upper is not None and found.upper <= allowed
    return Check(name, "passed" if held else "failed", words, f"{text(allowed)}{unit}")


def num_bytes(pack: Pack, limits: Limits) -> Check:
    """Whether the pack is small enough."""
    content = pack.manifest.totals.content
    if limits.max_bytes is None:
        return Check("bytes", "skipped", f"{content:,}", "no limit")
    return Check(
        "bytes", "passed" if content <= limits.max_bytes else "failed", f"{content:,}", f"{limits.max_bytes:,}"
    )


def budget(pack: Pack, limits: Limits) -> Check:
    """Whether it runs in a budget, with a context of 4,096 tokens or the model's positions."""
    if limits.budget_bytes is None:
        return Check("budget", "skipped", "", "no limit")
    allowed = size_text(limits.budget_bytes)
    context = min(_USUAL_CONTEXT, pack.spec.max_position_embeddings)
    try:
        plan = divide_budget(pack.layout, limits.budget_bytes, context, routing_bytes(pack.folder))
    except RunError as fault:
        return Check("budget", "failed", str(fault), allowed)
    most = int(expert_pages(pack.layout, plan.page_bytes).sum())
    return Check(
        "budget", "passed", f"room for {plan.num_pages / most:.0%} of experts beside {context} tokens", allowed
    )


def junit_xml(checks: list[Check], suite: str) -> bytes:
    """The checks as JUnit XML, one test case each."""
    counts = {status: sum(check.status == status for check in checks) for status in ("failed", "skipped")}
    facts = {"tests": str(len(checks)), "failures": str(counts["failed"]), "skipped": str(counts["skipped"])}
    root = ET.Element("testsuites", facts)
    held = ET.SubElement(root, "testsuite", {"name": _xml_text(suite), **facts, "errors": "0"})
    for check in checks:
        case = ET.SubElement(held, "testcase", {"classname": "moe-pack.check", "name": check.name})
        message = _xml_text(f"found {check.found}" + (f", allowed {check.allowed}" if check.allowed else ""))
        if check.status == "failed":
            ET.SubElement(case, "failure", {"message": message}).text = message
        elif check.status == "skipped":
            ET.SubElement(case, "skipped", {"message": message})
        else:
            ET.SubElement(case, "system-out").text = message
    ET.indent(root)
    return b"<?xml version='1.0' encoding='utf-8'?>\n" + ET.tostring(root, encoding="unicode").encode() + b"\n"


def _xml_text(text: str) -> str:
    return _NO_XML.sub("?", text)


def _faultless(name: str, allowed: str, work: Callable[[], str]) -> Check:
    try:
        return Check(name, "passed", work(), allowed)
    except (PackError, PlanError) as fault:
        return Check(name, "failed", str(fault), allowed)
