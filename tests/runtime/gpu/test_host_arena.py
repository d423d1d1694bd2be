"""A pack's experts in host memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import TinyMixtral, pack
from support.profiles import Recorder

from moe_pack.formats import Pack, PackError
from moe_pack.runtime.gpu.devices import HostArena, host_bytes

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers of three experts, of 47 neurons: extents end anywhere."""
    source = TinyMixtral(num_layers=2, num_experts=3, intermediate_size=47).write(tmp_path / "source")
    pack(source, tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_extent_is_the_packs_on_a_line_of_its_own(folder: Path, num_threads: int) -> None:
    with Pack(folder) as opened, HostArena(opened, CPU, num_threads=num_threads) as arena:
        for l, layer in enumerate(opened.layout.experts):
            assert not (arena.extent_at[l] % 128).any() and arena.rows(l).data_ptr() % 4096 == 0
            for e, layout in enumerate(layer):
                begin = int(arena.extent_at[l][e])
                held = arena.rows(l)[begin : begin + layout.num_bytes].numpy()
                assert np.array_equal(held, opened.read_extent(l, e))
        assert arena.num_bytes == host_bytes(opened)
        assert arena.locked_bytes == 0, "there is no GPU"


def test_progress_is_told_of_all_bytes(folder: Path) -> None:
    told = Recorder()
    with Pack(folder) as opened, HostArena(opened, CPU, told):
        assert told.done == sum(expert.num_bytes for layer in opened.layout.experts for expert in layer)


def test_a_damaged_expert_is_named_unless_none_is_to_be_checked(folder: Path) -> None:
    with Pack(folder) as opened:
        path, place = folder / opened.manifest.expert_files[1].name, opened.layout.offsets[1][2]
        raw = bytearray(path.read_bytes())
        raw[place + 5] ^= 1
        path.write_bytes(raw)
        with pytest.raises(PackError, match=r"^experts-001.safetensors: expert 2: CRC-32 does not match"):
            HostArena(opened, CPU)
        with HostArena(opened, CPU, verify=False) as unchecked:
            assert unchecked.rows(1)[int(unchecked.extent_at[1][2]) + 5] == raw[place + 5]


def test_a_file_that_is_cut_is_named(folder: Path) -> None:
    with Pack(folder) as opened:
        path = folder / opened.manifest.expert_files[0].name
        path.write_bytes(path.read_bytes()[:-4096])
        with pytest.raises(PackError, match=r"^experts-000.safetensors: (ends at byte|expert 2)"):
            HostArena(opened, CPU)


class FakeRuntime:
    """CUDA's functions that page-lock memory, and a log of what was asked, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 # CUDA's names
        self.log.append("lock")
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.log.append("unlock")
        return 0


def test_memory_is_unlocked_only_when_the_card_has_done_what_it_was_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.log.append("wait"))
    with Pack(folder) as opened, HostArena(opened, torch.device("cuda")) as arena:
        assert arena.is_locked
    assert runtime.log == ["lock", "lock", "wait", "unlock", "unlock"]
