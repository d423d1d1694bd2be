"""Checks of a finished pack against limits, for the command `check`, and their results as tables for machines.

A check is `skipped` if nobody asked for it or it has no meaning for the pack, and `unchecked` if it could not be made.
"""

import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moe_pack import formats
from moe_pack.calib.evaluate import check_source
from moe_pack.convert.account import totals
from moe_pack.convert.options import CheckLimits
from moe_pack.convert.verify import same_tensors
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import manifests
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.parts.specs import num_parameters
from moe_pack.runtime import offload
from moe_pack.runtime.offload.budgets import BudgetTooSmall
from moe_pack.runtime.quality import Estimate, Quality

_DEFAULT_CONTEXT = 4096  # tokens, as moe-run has by default; fewer if the model has fewer positions
_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML 1.0 does not allow

Status = Literal["passed", "failed", "skipped", "unchecked"]
_NO_LIMIT = "no limit"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check and its result."""

    name: str
    status: Status
    # found, allowed: texts for people
    found: str
    allowed: str = ""
    value: float | None = None  # what was found, in `unit`; None if it is no number or unknown
    upper: float | None = None  # the upper end of the value's 95% interval
    limit: float | None = None  # the largest value allowed
    unit: Literal["nats", "share", "bytes"] | None = None  # nats a token, a share, or bytes
    seconds: float = 0.0  # how long the check took


def timed(check: Callable[[], CheckResult]) -> CheckResult:
    """Returns the result of a check with the seconds that it took."""
    start = time.monotonic()
    result = check()
    return replace(result, seconds=time.monotonic() - start)


def check_schema(folder: Path) -> tuple[formats.Pack | None, CheckResult]:
    """Opens a pack, which the caller closes, and returns the check of its schema; the pack is None if that fails."""
    try:
        pack = formats.Pack(folder)
    except formats.PackError as fault:
        return None, CheckResult("schema", "failed", str(fault), "a valid pack")
    manifest = pack.manifest
    listed = f"format {manifest.version}, {len(manifest.files) + len(manifest.expert_files)} files"
    return pack, CheckResult("schema", "passed", listed, "a valid pack")


def _result_of(name: str, allowed: str, work: Callable[[], str]) -> CheckResult:
    """Returns the check that passes unless `work` raises an error; `work` returns what it found."""
    try:
        return CheckResult(name, "passed", work(), allowed)
    except (formats.PackError, formats.PlanError) as fault:
        return CheckResult(name, "failed", str(fault), allowed)


def check_digests(pack: formats.Pack, progress: formats.Progress = formats.NO_PROGRESS) -> CheckResult:
    """Checks that every byte is as it was written."""

    def work() -> str:
        audit(pack, progress)
        return f"{pack.manifest.totals.content:,} bytes, root {pack.manifest.root[:16]}"

    return _result_of("digests", "as written", work)


def check_tensors(pack: formats.Pack, checkpoint: Checkpoint | None) -> CheckResult:
    """Checks that every tensor of the source and every byte of the pack is accounted for.

    Meaning: `source.json` accounts for as many weights as the model has; every tensor left out has a reason; bytes by
             part are those of the layout; a checkpoint, if given, has the same tensors and routers.
    """
    if pack.is_synthetic:
        return CheckResult("tensors", "skipped", "a synthetic pack has no checkpoint")

    def work() -> str:
        if checkpoint is not None:
            same_tensors(pack, checkpoint)
            check_source(pack, checkpoint)
        return _accounted(pack)

    return _result_of("tensors", "as in the source" if checkpoint else "all accounted for", work)


def _accounted(pack: formats.Pack) -> str:
    tensors = manifests.read_account(pack.read_file(manifests.SOURCE_FILE).tobytes()).tensors
    num_weights, expected = sum(tensor.num_weights for tensor in tensors), num_parameters(pack.spec)
    if num_weights != expected:
        raise formats.PackError(
            f"{manifests.SOURCE_FILE}: found {num_weights:,} weights in the pack, expected {expected:,}: the model's"
        )
    for tensor in tensors:
        if (tensor.fate in ("unused", "dropped")) != bool(tensor.reason):
            raise formats.PackError(
                f"{manifests.SOURCE_FILE}: tensor {tensor.name!r}: found fate {tensor.fate} and reason "
                f"{tensor.reason!r}, expected a reason for a tensor that is left out, and for no other"
            )
    if totals(pack.layout, pack.manifest.files) != pack.manifest.totals:
        raise formats.PackError(f"{manifests.MANIFEST_FILE}: totals do not match the sizes of the files")
    counts = {fate: sum(tensor.fate == fate for tensor in tensors) for fate in ("unused", "dropped")}
    return f"{len(tensors)} tensors, {num_weights:,} weights" + "".join(
        f"; {number} tensors {fate}" for fate, number in counts.items() if number
    )


def check_losses(quality: Quality | None, limits: CheckLimits, origin: str) -> list[CheckResult]:
    """Checks that the upper ends of the 95% intervals of the loss are within the limits.

    A loss that is unknown, or known without an interval, is unchecked if it has a limit.
    Args:    origin: of `quality`, in words; if there is no quality, why.
    """
    against = None if quality is None else quality.against
    kl, increase = (None, None) if against is None else (against.kl, against.perplexity_increase)
    return [
        _check_loss(CheckResult("kl", "skipped", origin, unit="nats"), kl, limits.max_kl),
        _check_loss(CheckResult("perplexity", "skipped", origin, unit="share"), increase, limits.max_ppl_increase),
    ]


def _check_loss(skipped: CheckResult, loss: Estimate | None, limit: float | None) -> CheckResult:

    def text(x: float) -> str:
        return f"{x:.4g} nats" if skipped.unit == "nats" else f"{x:+.3%}"

    check = replace(skipped, limit=limit, allowed=_NO_LIMIT if limit is None else text(limit))
    if loss is None:
        return check if limit is None else replace(check, status="unchecked")
    check = replace(check, value=loss.value, upper=loss.upper)
    if loss.upper is None:
        status: Status = "skipped" if limit is None else "unchecked"
        found = f"{text(loss.value)}; too few tokens for an interval ({check.found})"
    else:
        status = "skipped" if limit is None else "passed" if loss.upper <= limit else "failed"
        found = f"{text(loss.value)}, at most {text(loss.upper)} with 95% confidence ({check.found})"
    return replace(check, status=status, found=found)


def check_bytes(pack: formats.Pack, limits: CheckLimits) -> CheckResult:
    """Checks the size of the pack."""
    content, limit = pack.manifest.totals.content, limits.max_bytes
    check = CheckResult("bytes", "skipped", f"{content:,}", _NO_LIMIT, value=content, unit="bytes")
    if limit is None:
        return check
    return replace(check, status="passed" if content <= limit else "failed", allowed=f"{limit:,}", limit=limit)


def check_budget(pack: formats.Pack, limits: CheckLimits) -> CheckResult:
    """Checks that `moe-run` accepts the budget, with a context of 4,096 tokens or the model's positions."""
    if limits.budget_bytes is None:
        return CheckResult("budget", "skipped", "", _NO_LIMIT)
    asked = CheckResult(
        "budget", "failed", "", formats.size_text(limits.budget_bytes), limit=limits.budget_bytes, unit="bytes"
    )
    context = min(_DEFAULT_CONTEXT, pack.spec.max_position_embeddings)
    try:
        plan = offload.divide_budget(pack.layout, limits.budget_bytes, context, offload.routing_bytes(pack.folder))
    except BudgetTooSmall as fault:
        return replace(asked, found=fault.worded("--budget", None))
    share = plan.num_pages / int(offload.expert_pages(pack.layout, plan.page_bytes).sum())
    found = f"memory for {share:.0%} of experts, with a context of {context}"
    return replace(asked, status="passed", found=found)


def exit_code_of(checks: Sequence[CheckResult]) -> int:
    """Returns the exit code of checks: 1 if one fails, else 3 if one could not be made, else 0."""
    statuses = {check.status for check in checks}
    return 1 if "failed" in statuses else 3 if "unchecked" in statuses else 0


def markdown_table(checks: Sequence[CheckResult], title: str) -> str:
    """Returns the checks as a heading and a table in GitHub's Markdown, such as for a step's summary."""
    marks = {"passed": "✅ passed", "failed": "❌ failed", "skipped": "skipped", "unchecked": "⚠️ unchecked"}
    rows = [("check", "result", "found", "allowed"), ("---",) * 4]
    rows += [(check.name, marks[check.status], check.found, check.allowed) for check in checks]
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([f"### {_cell(title)}", "", *lines, "", ""])


def _cell(text: str) -> str:
    """Returns a text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\`*_{}\[\]<>|~&])", r"\\\1", " ".join(text.split()))


def junit_xml(checks: Sequence[CheckResult], suite: str) -> bytes:
    """Returns the checks as JUnit XML, one test case each; a check that could not be made is an error."""
    tags: dict[Status, str] = {"failed": "failure", "skipped": "skipped", "unchecked": "error", "passed": "system-out"}
    counts = {status: str(sum(check.status == status for check in checks)) for status in tags}
    facts = {
        "tests": str(len(checks)),
        "failures": counts["failed"],
        "errors": counts["unchecked"],
        "skipped": counts["skipped"],
        "time": f"{sum(check.seconds for check in checks):.3f}",
    }
    root = ET.Element("testsuites", facts)
    cases = ET.SubElement(root, "testsuite", {"name": _xml_text(suite), **facts})
    for check in checks:
        names = {"classname": "moe-pack.check", "name": check.name, "time": f"{check.seconds:.3f}"}
        allowed = check.allowed if check.allowed in ("", _NO_LIMIT) else f"allowed: {check.allowed}"
        message = _xml_text("; ".join(part for part in (check.found, allowed) if part))
        result = ET.SubElement(ET.SubElement(cases, "testcase", names), tags[check.status])
        if check.status == "passed":
            result.text = message
        else:
            result.set("message", message)
    ET.indent(root)
    return b"<?xml version='1.0' encoding='utf-8'?>\n" + ET.tostring(root, encoding="unicode").encode() + b"\n"


def _xml_text(text: str) -> str:
    return _NO_XML.sub("?", text)
