"""The packs that a GPU is measured with: synthetic ones in memory, made where they are not there, and the demo model's.

A lent machine has no network and little time: a pack is made on the spot by all cores and stays in memory for parts
that need it again. `make_room` takes away the others.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpu_results import Results
from models import DEMO_MODEL, TinyMixtral

from moe_pack.convert.random_routers import skewed_popularity
from moe_pack.convert.synthetic import Character, synthesize
from moe_pack.formats import ExpertFormat, ModelSpec, Plan, model_spec, part_format, uniform_plan
from moe_pack.formats.plan import uniform_dense

_GROUP = 64
_SKEW, _CORRELATION = 0.5, 0.5
_MEMORY = Path("/dev/shm")
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class PackMade:
    """A pack that was made, or was there already: `seconds` is 0 then."""

    name: str
    layers: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ask:
    """A synthetic pack. `layers`: None for all.   `plan`: made for the model's spec."""

    name: str
    model: str
    plan: Callable[[ModelSpec], Plan]
    sparsity: float
    layers: int | None = None


def mixed_plan(spec: ModelSpec) -> Plan:
    """Selectors of 2 bits, records of 2 and 4 bits by turns, the dense part in 4."""
    low, high = part_format(2, _GROUP), part_format(4, _GROUP)
    formats = (ExpertFormat(low, low, low), ExpertFormat(high, low, high))
    experts = tuple(
        tuple(formats[(l + e) % 2] for e in range(spec.router.num_experts)) for l in range(len(spec.moe_layers))
    )
    return Plan("up", "nearest", experts, uniform_dense(spec, high))


def even_plan(selector_bits: int, record_bits: int, dense_bits: int = 4) -> Callable[[ModelSpec], Plan]:
    """Selectors and records of these widths, the dense part in another."""
    selector, record, dense = (part_format(bits, _GROUP) for bits in (selector_bits, record_bits, dense_bits))
    return lambda spec: uniform_plan(spec, "up", selector, record, dense, "nearest")


def make_synthetic(results: Results, ask: Ask) -> Path:
    """The pack asked for; of a tiny model in a rehearsal."""
    folder = _folder(results.is_rehearsal) / ask.name
    source = ask.model
    if results.is_rehearsal:
        folder.mkdir(parents=True, exist_ok=True)
        tiny = TinyMixtral(num_layers=2, num_experts=4, vocab_size=128)
        config = folder.with_suffix(".json")
        config.write_text(json.dumps(tiny.config_json()))
        source = str(config)
    spec = model_spec(source, None if results.is_rehearsal else ask.layers)
    start, was_there = time.perf_counter(), (folder / "manifest.json").exists()
    if not was_there:
        folder.mkdir(parents=True, exist_ok=True)
        character = Character(ask.sparsity, skewed_popularity(spec, _SKEW, 0), _CORRELATION, 0)
        synthesize(spec, ask.plan(spec), character, folder, len(os.sched_getaffinity(0)))
    seconds = 0.0 if was_there else time.perf_counter() - start
    results.add(PackMade(ask.name, len(spec.moe_layers), pack_bytes(folder), seconds))
    return folder


def make_demo(results: Results, sparsity: float) -> Path:
    """The demo model in 4 bits."""
    folder = _folder(results.is_rehearsal) / f"demo-{sparsity:g}"
    start, was_there = time.perf_counter(), (folder / "manifest.json").exists()
    if not was_there:
        command = [sys.executable, "-m", "moe_pack.convert.cli", "convert", str(DEMO_MODEL), "--quantizer", "nearest"]
        command += ["--selector-bits", "4", "--record-bits", "4", "--sparsity", str(sparsity), "-o", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = 0.0 if was_there else time.perf_counter() - start
    results.add(PackMade(folder.name, 4, pack_bytes(folder), seconds))
    return folder


def pack_bytes(folder: Path) -> int:
    """Bytes of a pack's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def make_room(is_rehearsal: bool, keep: tuple[str, ...] = ()) -> None:
    """Removes all packs but those of these names."""
    folder = _folder(is_rehearsal)
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and path.name not in keep:
            shutil.rmtree(path)


def _folder(is_rehearsal: bool) -> Path:
    """Where packs go: in memory, where there is such a file system."""
    if is_rehearsal or not os.access(_MEMORY, os.W_OK):
        return _ROOT / "build" / "gpu-packs"
    return _MEMORY / f"moe-pack-gpu-{os.getuid()}"
