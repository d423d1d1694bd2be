"""Which kernels an engine launches, seen without a GPU: a driver that compiles and launches nothing, plain memory.

Run as a program without TRITON_INTERPRET (`launched_kernels.py FOLDER`), it writes as JSON how many kernels, told
apart by Triton's own keys, a pack's engine has launched after `run_everything`, and after prompts of many lengths.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

CONTEXT, CHUNK = 300, 160


def launched(folder: Path) -> dict[str, int]:
    """What the program writes for a pack."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def main() -> None:
    from triton.runtime.driver import driver

    from moe_pack.formats import Pack
    from moe_pack.runtime.gpu.ahead import collected_launches
    from moe_pack.runtime.gpu.token.engine import run_everything
    from support.compiled_kernels import RecordingDriver
    from support.gpu_runs import GpuRun, gpu_engine

    driver.set_active(RecordingDriver(90))
    counts, folder = {}, Path(sys.argv[1])
    run = GpuRun(0.3, chunk_tokens=CHUNK, context_tokens=CONTEXT)
    with Pack(folder) as pack, collected_launches() as jobs:
        with gpu_engine(folder, run) as built:
            run_everything(pack, built, CHUNK)
        counts["everything"] = len(jobs)
        with gpu_engine(folder, run) as built:
            for length in (1, 2, *range(3, CONTEXT, 19)):
                ids = torch.randint(pack.spec.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
                built.decoder.reset()
                built.decoder.next_logits(ids.tolist())
                built.decoder.next_logits([0])
        counts["prompts"] = len(jobs)
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main()
