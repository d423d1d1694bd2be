"""One run of moe-run or llama.cpp from an empty page cache, in a memory cgroup: its times, its memory, its end."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_packs import llama_command
from memory_cgroup import Measured, MemoryCgroup, back_free_memory, drop_page_cache, measure, tree_anonymous_bytes

from moe_pack.formats import Pack

SPARE_BYTES = 400_000_000  # of the cgroup beyond the budget: interpreter, libraries, what is mapped of the files
_LIMIT_SECONDS = 900.0  # for a whole run; what takes longer is stopped


@dataclass(frozen=True, slots=True)
class Task:
    """What every program runs: so many random tokens as the prompt, then so many one by one."""

    prompt_tokens: int
    decode_tokens: int
    threads: int
    seed: int
    decode_limit_s: float  # of llama.cpp, which then has made fewer tokens


@dataclass(frozen=True, slots=True)
class ConfinedRun:
    """A run, measured. Times are None where it came to no end, `exit_code` is negative where a signal ended it.

    `decode_s`: for `num_tokens`, which were made one by one after the prompt.   `kills`: by the kernel, for want of
    memory.   `refused`: how often the cgroup was full and something had to go.   `facts`: what the program said.
    """

    program: str
    limit_bytes: int
    exit_code: int
    is_stopped: bool
    kills: int | None
    seconds: float
    prompt_s: float | None
    decode_s: float | None
    num_tokens: int
    peak_anonymous_bytes: int
    num_samples: int
    cgroup_peak_bytes: int | None
    refused: int
    major_faults: int
    is_cache_dropped: bool
    facts: dict[str, Any]
    errors: str

    @property
    def tokens_a_second(self) -> float | None:
        """Of decoding; None where there was none."""
        return self.num_tokens / self.decode_s if self.decode_s else None

    def fault(self) -> str | None:
        """Why it came to no end, or None."""
        if self.is_stopped:
            return f"{self.program}: stopped after {self.seconds:.0f} s"
        if self.exit_code:
            killed = f", {self.kills} kills" if self.kills else ""
            return f"{self.program}: ended with {self.exit_code}{killed}: {self.errors}"
        return None


def run_ours(program: str, pack: Path, task: Task, options: list[str], limit_bytes: int) -> ConfinedRun:
    """Runs `moe-run --bench` with these options."""
    command = [sys.executable, "-m", "moe_pack.runtime.cli", str(pack), "--bench", "--json", *options]
    command += ["--prompt-tokens", str(task.prompt_tokens), "--max-tokens", str(task.decode_tokens + 1)]
    command += ["--threads", str(task.threads), "--seed", str(task.seed)]
    dropped = drop_page_cache(pack)
    back_free_memory(limit_bytes)
    with MemoryCgroup(limit_bytes) as cgroup:
        measured = measure(cgroup.inside(command), tree_anonymous_bytes, limit_s=_LIMIT_SECONDS)
        facts = json.loads(measured.output) if measured.exit_code == 0 else {}
        num_tokens = facts["generated_tokens"] - 1 if facts else 0  # the first is the prompt's
        times = (facts.get("prefill_s"), facts.get("decode_s") or None, num_tokens)
        return _confined(program, cgroup, measured, times, facts, dropped)


def run_llama(program: str, llama_python: Path, gguf: Path, pack: Path, task: Task, limit_bytes: int) -> ConfinedRun:
    """Runs llama.cpp on a GGUF, mapped, with random tokens."""
    with Pack(pack) as opened:
        spec = opened.spec
    generator = np.random.default_rng(task.seed)
    prompt, tokens = (
        generator.integers(spec.vocab_size, size=n).tolist() for n in (task.prompt_tokens, task.decode_tokens)
    )
    asked = {"prompt": prompt, "tokens": tokens, "at_once": False, "threads": task.threads, "all_logits": False}
    command = [*llama_command(llama_python, gguf, spec), "--mapped"]
    command += ["--context", str(task.prompt_tokens + task.decode_tokens)]
    dropped = drop_page_cache(gguf.parent)
    back_free_memory(limit_bytes)
    with MemoryCgroup(limit_bytes) as cgroup:
        request = json.dumps(asked | {"limit_s": task.decode_limit_s}) + "\n"
        measured = measure(cgroup.inside(command), tree_anonymous_bytes, request, _LIMIT_SECONDS)
        facts = [json.loads(line) for line in measured.output.splitlines()] if measured.exit_code == 0 else []
        timing = facts[1] if facts else {}
        times = (timing.get("prompt_s"), timing.get("seconds"), timing.get("num_tokens", 0))
        return _confined(program, cgroup, measured, times, facts[0] if facts else {}, dropped)


def _confined(
    program: str,
    cgroup: MemoryCgroup,
    measured: Measured,
    times: tuple[float | None, float | None, int],
    facts: dict[str, Any],
    dropped: bool,
) -> ConfinedRun:
    prompt_s, decode_s, num_tokens = times
    return ConfinedRun(
        program=program,
        limit_bytes=cgroup.limit_bytes,
        exit_code=measured.exit_code,
        is_stopped=measured.is_stopped,
        kills=cgroup.num_kills,
        seconds=measured.seconds,
        prompt_s=prompt_s,
        decode_s=decode_s,
        num_tokens=num_tokens,
        peak_anonymous_bytes=measured.peak_bytes,
        num_samples=measured.num_samples,
        cgroup_peak_bytes=cgroup.peak_bytes,
        refused=cgroup.num_refused,
        major_faults=measured.major_faults,
        is_cache_dropped=dropped,
        facts=facts,
        errors=measured.errors if measured.exit_code else "",
    )
