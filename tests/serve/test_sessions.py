"""Files of sessions: the bytes that they may have together, and values that are not those that were saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cases import case
from models import PackMaker

from moe_pack.formats import Pack, RunError
from moe_pack.formats.safetensors import read_header
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.model.caches import CachedSequence
from moe_pack.runtime.offload import Sequences
from moe_pack.runtime.serve.sessions import SessionStore

CONTEXT, DIGEST = 160, "a" * 64


@contextmanager
def sequence_of(folder: Path) -> Iterator[tuple[Decoder, CachedSequence]]:
    options = EngineOptions(chunk_tokens=16)
    with Pack(folder) as opened, Engine(opened, options, CONTEXT, sequences=Sequences(1)) as engine:
        assert isinstance(engine.decoder, Decoder)
        yield engine.decoder, engine.decoder.sequences[0]


def test_sessions_are_at_most_as_large_as_all_may_be(demo_pack: PackMaker, tmp_path: Path) -> None:
    with sequence_of(demo_pack("none", 4)) as (decoder, sequence):

        def saved(store: SessionStore, folder: Path, first: int) -> list[Path]:
            sequence.reset()
            decoder.extend(sequence, list(range(first, first + 70)))
            store.save(sequence)
            return sorted(folder.glob("*"))

        folder = tmp_path / "one"
        (path,) = saved(SessionStore(folder, DIGEST, 1 << 30), folder, 10)
        size = path.stat().st_size
        for number, (most, kept) in enumerate(((size - 1, 0), (size, 1), (2 * size - 1, 1), (2 * size, 2))):
            with case(most, kept):
                folder = tmp_path / str(number)
                store = SessionStore(folder, DIGEST, most)
                before, after = saved(store, folder, 10), saved(store, folder, 20)
                assert len(after) == kept and sum(each.stat().st_size for each in after) <= most
                assert store.num_bytes == kept * size and store.num_failed == (2 if not kept else 0)
                assert kept != 1 or before != after, "the later one stays"


def test_a_session_with_a_bit_of_another_value_is_not_loaded(demo_pack: PackMaker, tmp_path: Path) -> None:
    """Values so close that no shape, order or range tells them from the right ones."""
    ids = list(range(10, 90))
    with sequence_of(demo_pack("none", 4)) as (decoder, sequence):
        decoder.extend(sequence, ids)
        assert SessionStore(tmp_path, DIGEST, 1 << 30).save(sequence)
        (path,) = tmp_path.glob("*.session")
        whole = path.read_bytes()
        tensors = [entry for entry in read_header(path, RunError) if entry.name.startswith("whole.")]
        assert len(tensors) > 3
        for entry in tensors:
            for place in (entry.offset, entry.offset + entry.num_bytes - 4):
                with case(entry.name, place):
                    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
                    store = SessionStore(tmp_path, DIGEST, 1 << 30)
                    with pytest.raises(RunError, match=f"{entry.name} is damaged"):
                        store.load([*ids, 1], sequence, 0)
                    assert sequence.num_tokens == 0 and not path.exists()
        path.write_bytes(whole)
        assert SessionStore(tmp_path, DIGEST, 1 << 30).load([*ids, 1], sequence, 0)
