"""Where a checkpoint is looked for: folders, the hub's local cache, short names; no network."""

import re
import shutil
from pathlib import Path

import pytest
from support.cases import case
from support.models import TinyMixtral

from moe_pack.convert import find_checkpoint
from moe_pack.formats import CheckpointError
from moe_pack.formats.gguf import GgufFiles

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub that cannot be reached."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


def cached(cache: Path, hub_id: str) -> Path:
    """A snapshot as the hub's client leaves it."""
    repo = cache / f"models--{hub_id.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    return TinyMixtral(num_shards=3).write(repo / "snapshots" / revision)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path)) == tmp_path


def test_a_hub_id_is_found_in_the_local_cache(cache: Path) -> None:
    snapshot = cached(cache, "someone/some-model")
    assert find_checkpoint("someone/some-model") == snapshot


def test_a_variant_names_the_quantization_of_gguf_files(cache: Path) -> None:
    snapshot = cached(cache, "someone/some-model")
    (snapshot / "model.safetensors.index.json").unlink()
    shutil.copy(DATA / "gguf" / "mixtral.gguf", snapshot / "some-model-Q8_0.gguf")
    for name in ("someone/some-model:Q8_0", "someone/some-model:q8_0"):
        files = find_checkpoint(name)
        assert isinstance(files, GgufFiles) and files.folder.name == "some-model-Q8_0.gguf", name
        files.close()
    for name in ("someone/some-model:Q8", "someone/some-model:Q4_K_M"):
        with pytest.raises(CheckpointError, match="is only partly in the cache"):
            find_checkpoint(name)


@pytest.mark.parametrize("name", ["mixtral", "Mixtral", "mixtral-8x7b"])
def test_a_short_name_stands_for_its_hub_id(name: str, cache: Path) -> None:
    snapshot = cached(cache, "mistralai/Mixtral-8x7B-v0.1")
    assert find_checkpoint(name) == snapshot


def test_without_network_one_line_says_what_was_looked_for_and_where(cache: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint("mixtral")
    assert re.fullmatch(
        rf"mixtral: no such file or folder, and the hub id mistralai/Mixtral-8x7B-v0\.1 is not in the cache {cache}; "
        r"the download failed: [^\n]+",
        str(caught.value),
    )


def test_a_cached_model_with_a_shard_missing_is_said_to_be_there_only_in_part(cache: Path) -> None:
    snapshot = cached(cache, "someone/some-model")
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"hub id someone/some-model is only partly in the cache"):
        find_checkpoint("someone/some-model")


def test_what_can_be_no_hub_id_is_refused_with_similar_names() -> None:
    with pytest.raises(CheckpointError, match=r"has this name; moe-pack convert --list prints all names$"):
        find_checkpoint("no-such-name")
    with pytest.raises(CheckpointError, match=r"; did you mean olmoe-1b-7b or olmoe\? moe-pack convert --list prints "):
        find_checkpoint("olmoe-1b")
    for source in ["./nowhere", "a/b/c", "../x", "owner/", "/nowhere", "nowhere.gguf"]:
        with case(source), pytest.raises(CheckpointError, match="no such file or folder, and no name of the hub"):
            find_checkpoint(source)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"is a file, expected the folder with config\.json"):
        find_checkpoint(str(tmp_path / "model.safetensors"))
