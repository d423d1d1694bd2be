"""The packs that a GPU is measured with: synthetic ones of a model's dimensions, and the demo model's.

A lent machine has no network and little time: a pack is made on the spot by all cores, in memory where there is room
for it, else on the disk, and stays for the parts that need it again.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_results import Results
from models import DEMO_MODEL
from synthetic import shrunk

from moe_pack.convert.random_routers import skewed_popularity
from moe_pack.convert.synthetic import Character, synthesize
from moe_pack.formats import (
    ExpertFormat,
    GroupedQuerySpec,
    ModelSpec,
    Plan,
    dense_roles,
    model_spec,
    pack_layout,
    part_format,
    uniform_plan,
)
from moe_pack.formats.plan import uniform_dense

MEMORY = Path("/dev/shm")
_GROUP = 64
_SKEW, _CORRELATION = 0.5, 0.5
_SPARE_BYTES = 2 << 30  # of a file system, that stays free
_DEMO_BYTES = 10 << 20
_TINY_VOCABULARY = 256
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class PackMade:
    """A pack that was made, or was there already: `seconds` is 0 then."""

    name: str
    folder: str
    layers: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PackWanted:
    """A synthetic pack. `model`: a published one's name.   `plan`: made for the model's spec."""

    name: str
    model: str
    plan: Callable[[ModelSpec], Plan]
    sparsity: float


def mixed_plan(spec: ModelSpec) -> Plan:
    """Selectors of 2 bits, records of 2 and 4 bits by turns, the dense part in 4."""
    low, high = part_format(2, _GROUP), part_format(4, _GROUP)
    formats = (ExpertFormat(low, low, low), ExpertFormat(high, low, high))
    experts = tuple(
        tuple(formats[(l + e) % 2] for e in range(spec.router.num_experts)) for l in range(len(spec.moe_layers))
    )
    return Plan("up", "nearest", experts, uniform_dense(spec, high))


def even_plan(bits: int) -> Callable[[ModelSpec], Plan]:
    """All parts in this width."""
    part = part_format(bits, _GROUP)
    return lambda spec: uniform_plan(spec, "up", part, part, part, "nearest")


# Mixtral-8x7B with selectors of 2 bits, records of 2 and 4 by turns, 80% of the neurons not running; Qwen3-30B-A3B in 4
# bits, all neurons running.
MIXTRAL = PackWanted("mixtral-8x7b-mixed", "mixtral-8x7b", mixed_plan, 0.8)
QWEN3 = PackWanted("qwen3-30b-a3b-4bit", "qwen3-30b-a3b", even_plan(4), 0.0)


def make_synthetic(results: Results, wanted: PackWanted, is_tiny: bool = False) -> Path:
    """The pack's folder; if tiny, and in a rehearsal, of a model of two narrow layers with the same parts."""
    spec = _tiny(wanted.model) if is_tiny or results.is_rehearsal else model_spec(wanted.model, None)
    plan = wanted.plan(spec)
    files = pack_layout(spec, plan, ["BF16"] * len(dense_roles(spec))).files()
    folder = _folder_for(wanted.name, sum(file.num_bytes for _, file in files), results.is_rehearsal)
    start, was_there = time.perf_counter(), (folder / "manifest.json").exists()
    if not was_there:
        folder.mkdir(parents=True, exist_ok=True)
        character = Character(wanted.sparsity, skewed_popularity(spec, _SKEW, 0), _CORRELATION, 0)
        synthesize(spec, plan, character, folder, len(os.sched_getaffinity(0)))
    seconds = 0.0 if was_there else time.perf_counter() - start
    results.add(PackMade(wanted.name, str(folder), len(spec.moe_layers), pack_bytes(folder), seconds))
    return folder


def _tiny(model: str) -> ModelSpec:
    """A published model with two narrow layers, eight experts, of which a token takes two, and four heads."""
    spec = shrunk(model, 2, vocab_size=_TINY_VOCABULARY)
    router = replace(spec.router, num_experts=8, num_experts_per_tok=2)
    attention = spec.attention
    assert isinstance(attention, GroupedQuerySpec), "as all models have it that are run here"
    return replace(spec, router=router, attention=replace(attention, num_heads=4, num_kv_heads=2))


def make_demo(results: Results, sparsity: float) -> Path:
    """The demo model in 4 bits, with this share of its neurons below their thresholds."""
    folder = _folder_for(f"demo-{sparsity:g}", _DEMO_BYTES, results.is_rehearsal)
    start, was_there = time.perf_counter(), (folder / "manifest.json").exists()
    if not was_there:
        command = [sys.executable, "-m", "moe_pack.convert.cli", "convert", str(DEMO_MODEL), "--quantizer", "nearest"]
        command += ["--selector-bits", "4", "--record-bits", "4", "--sparsity", str(sparsity), "-o", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command[2:])}: {done.stderr.strip()[-1000:]}"
    seconds = 0.0 if was_there else time.perf_counter() - start
    results.add(PackMade(folder.name, str(folder), 4, pack_bytes(folder), seconds))
    return folder


def pack_bytes(folder: Path) -> int:
    """Bytes of a pack's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def remove_packs(is_rehearsal: bool, keep: tuple[str, ...] = ()) -> None:
    """Removes all packs but those of these names."""
    for folder in _folders(is_rehearsal):
        for path in folder.iterdir() if folder.exists() else ():
            if path.is_dir() and path.name not in keep:
                shutil.rmtree(path)


def _folders(is_rehearsal: bool) -> list[Path]:
    """Where packs go, the best place first."""
    on_disk = _ROOT / "build" / "gpu-packs"
    has_memory = not is_rehearsal and os.access(MEMORY, os.W_OK)
    return [*([MEMORY / f"moe-pack-gpu-{os.getuid()}"] if has_memory else []), on_disk]


def _folder_for(name: str, num_bytes: int, is_rehearsal: bool) -> Path:
    """A pack's folder: where it is already, else the first place with so much room.

    A file system in memory may be much smaller than the memory.
    Raises:  OSError if there is no room.
    """
    folders = _folders(is_rehearsal)
    for folder in folders:
        if (folder / name / "manifest.json").exists():
            return folder / name
    free = {}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        free[folder] = shutil.disk_usage(folder).free - _SPARE_BYTES
        if free[folder] >= num_bytes:
            return folder / name
    listed = ", ".join(f"{folder} {max(room, 0):,}" for folder, room in free.items())
    raise OSError(f"{name}: {num_bytes:,} bytes have no room; free are {listed}")
