"""Checkpoints by name: a folder, a GGUF file, or on the hub, downloaded or streamed; and the model card of packs there.

A model card that exists is kept: only the pack's own section, between two marks, is replaced. The card says nothing
that is not known: without `quality.json` the loss is "not measured".
"""

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_pack import formats
from moe_pack.convert.options import StreamOptions
from moe_pack.formats import hub
from moe_pack.formats.families import Checkpoint, checkpoint_files, weight_files
from moe_pack.formats.gguf import files
from moe_pack.formats.gguf.header import part_paths
from moe_pack.formats.hub.names import source_name
from moe_pack.runtime.quality import Estimate, Quality, bits_per_weight, read_quality

CARD_FILE = "README.md"
_TAGS = ("moe-pack", "mixture-of-experts")
_WANTED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")


def find_checkpoint(
    source: str, progress: formats.Progress = formats.NO_PROGRESS
) -> Path | checkpoint_files.CheckpointFiles:
    """Returns the folder of the checkpoint that `source` names; of GGUF, the open files, which `Checkpoint` closes.

    A hub id (`owner/name`, with a folder and a revision of it as `owner/name:folder@v1`, or with a quantization of GGUF
    files as `owner/name:Q4_K_M`) or a short name (`mixtral`) is looked up in the hub's local cache, and downloaded to
    it if it is missing or incomplete there.
    Raises:  CheckpointError with what was searched, and where.
    """
    path = Path(source)
    if (gguf := files.find_gguf(path)) is not None:
        others = [name for name in weight_files.file_names(path) if not name.endswith(".gguf")] if path.is_dir() else []
        return files.GgufFiles(gguf, weight_files.unused_notes(others, ()))
    if path.is_dir():
        return path
    name = source_name(source)
    searched = f"{source}: no such file or folder, and the hub id {name.text()} is not in the cache"
    snapshot = hub.cached_snapshot(name, formats.CheckpointError)
    if snapshot is not None:
        if (cached := _cached(name, snapshot)) is not None:
            return cached
        searched = f"{source}: the hub id {name.text()} is only partly in the cache"
    from huggingface_hub import constants

    searched = f"{searched} {constants.HF_HUB_CACHE}"
    with _said(searched):
        repository = hub.HubRepository(name, formats.CheckpointError)
        if paths := _gguf_paths(name, repository.files):
            snapshot = repository.download(paths, progress=progress)
            gguf = files.find_gguf(snapshot / paths[0])
            assert gguf is not None, f"{paths[0]} is a GGUF file"
            return files.GgufFiles(gguf)
    wanted = (*_WANTED, *_shards(name, repository, searched))
    with _said(searched):
        patterns = [name.path(pattern) for pattern in wanted]
        folder = repository.download(patterns, (name.path("*/*"),), progress) / name.variant
    if not is_complete(folder):
        raise formats.CheckpointError(f"{searched}, and the hub does not have its config.json")
    return folder


@contextmanager
def _said(searched: str) -> Iterator[None]:
    """Says in the error of a download what was searched before."""
    try:
        yield
    except formats.CheckpointError as fault:
        raise formats.CheckpointError(f"{searched}; the download failed: {fault}") from fault


def _shards(name: hub.HubName, repository: hub.HubRepository, searched: str) -> tuple[str, ...]:

    def read_index() -> object:
        path = name.path(weight_files.INDEX)
        with _said(searched):
            raw = repository.read(path, 0, repository.files[path].num_bytes)
        checkpoint_files.check_small_file(raw, weight_files.INDEX)
        return formats.parse(raw.tobytes(), weight_files.INDEX, formats.CheckpointError, is_foreign=True)

    return weight_files.find_weights(name.text(), repository.names(), read_index).shards


def _gguf_paths(name: hub.HubName, paths: Iterable[str]) -> list[str]:
    """Returns which of a repository's files are the GGUF model of a variant, which its name has as a word: Q4_K_M."""
    word = re.compile(rf"(^|[-.]){re.escape(name.variant)}([-.]|$)", re.IGNORECASE)
    return sorted(path for path in paths if name.variant and path.endswith(".gguf") and word.search(Path(path).name))


def _cached(name: hub.HubName, snapshot: Path) -> Path | checkpoint_files.CheckpointFiles | None:
    """Returns the checkpoint or the GGUF files of a variant in a snapshot of the cache; None if a part is missing."""
    if is_complete(snapshot / name.variant):
        return snapshot / name.variant
    for path in _gguf_paths(name, (str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf"))):
        try:
            first = part_paths(snapshot / path)[0]
        except formats.CheckpointError:
            continue
        return files.GgufFiles(first)
    return None


def open_streamed(
    source: str, folder: Path, quota_bytes: int = hub.STREAM_BYTES
) -> Path | checkpoint_files.CheckpointFiles:
    """Returns the files of a checkpoint on the hub that is not downloaded whole; its folder if the cache has it.

    Args:    folder: on whose disk pieces of it are, at most `quota_bytes` at a time.
    Raises:  UsageError if the source is on this disk; CheckpointError if the hub does not have it, or has it as GGUF
             files that are not in the cache.
    """
    if Path(source).exists():
        raise formats.UsageError(f"--stream reads from the hub, and {source} is on this disk; remove --stream")
    name = source_name(source)
    snapshot = hub.cached_snapshot(name, formats.CheckpointError)
    if snapshot is not None and (cached := _cached(name, snapshot)) is not None:
        return cached
    repository = hub.HubRepository(name, formats.CheckpointError)
    if paths := _gguf_paths(name, repository.files):
        revision = "" if name.revision is None else f" --revision {name.revision}"
        raise formats.CheckpointError(
            f"{source}: GGUF files cannot be streamed; download them first: hf download {name.repository} "
            f"{' '.join(paths)}{revision}"
        )
    return hub.StreamedFiles(repository, folder, quota_bytes)


def is_complete(folder: Path) -> bool:
    """Returns whether a cached snapshot has its config and every shard that its index names, or the single file."""
    if not (folder / "config.json").exists():
        return False
    index, shards = folder / weight_files.INDEX, {weight_files.SINGLE}
    if index.exists():
        shards = set(re.findall(r'"([^"/]+\.safetensors)"', index.read_text("utf-8", "replace")))
    is_single = (folder / weight_files.SINGLE).exists() and weight_files.SINGLE not in shards
    return is_single or all((folder / shard).exists() for shard in shards)


def open_source(
    source: str, stream: StreamOptions, output: Path, progress: formats.Progress = formats.NO_PROGRESS
) -> Checkpoint:
    """Opens a checkpoint by a path or a name of the hub, downloaded or streamed; says how it is read.

    Args:    output: where the pack or profile will be; pieces of a streamed source are on the same disk.
    Raises:  CheckpointError; UsageError if --stream is given for a source on this disk.
    """
    if not stream.is_given:
        checkpoint = Checkpoint(find_checkpoint(source, progress))
    else:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        space = hub.STREAM_BYTES if stream.space_bytes is None else stream.space_bytes
        checkpoint = Checkpoint(open_streamed(source, output.absolute().parent, space))
    for note in checkpoint.notes():
        progress.say(note)
    return checkpoint


def check_stream_space(files: hub.StreamedFiles, output: Path, output_bytes: int) -> str:
    """Returns a line that says how much of the disk a streamed source and the output need.

    Args:    output: a folder, in which an earlier run may have left files.   output_bytes: its size in the end.
    Raises:  ConversionError if the disk lacks it.
    """
    present = sum(path.stat().st_blocks * 512 for path in output.rglob("*") if path.is_file())
    needed, free = files.disk_bytes + output_bytes, shutil.disk_usage(output.absolute().parent).free + present
    parts = (
        f"{formats.size_text(files.disk_bytes)} for pieces of the source, {formats.size_text(output_bytes)} for "
        "the pack"
    )
    if needed > free:
        raise formats.ConversionError(
            f"{output}: needs {formats.size_text(needed)} on its disk ({parts}), where {formats.size_text(free)} can "
            "be used; free some, or give less with --stream-space"
        )
    return f"the disk needs {formats.size_text(needed)}: {parts}"


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Facts that the pack itself does not have. None: unknown, or to leave out."""

    base_model: str | None = None
    license: str | None = None  # of the base model
    command: str | None = None  # which made the pack
    budget: str | None = None  # a memory in which the pack runs, as an option takes it


def card_text(old: str | None, pack: formats.Pack, name: hub.HubName, facts: CardFacts) -> str:
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
    added: dict[str, Any] = {"library_name": "moe-pack", "pipeline_tag": "text-generation"}
    if facts.base_model is not None:
        added |= {"base_model": facts.base_model, "base_model_relation": "quantized"}
    if facts.license is not None:
        added["license"] = facts.license
    tags = known.get("tags") or []
    return {**added, **known, "tags": [*tags, *(tag for tag in _TAGS if tag not in tags)]}


def _section(pack: formats.Pack, name: hub.HubName, facts: CardFacts) -> str:
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
