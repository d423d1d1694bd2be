"""How tokens are chosen where nobody says it: the option, else generation_config.json, else the defaults."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cases import case

from moe_pack.formats import CheckpointError, RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.engine.options import AskedSampling, usual_sampling


def usual(folder: Path, config: dict[str, Any] | None) -> SamplingOptions:
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if config is not None:
        path.write_text(json.dumps(config))
    return usual_sampling(FolderFiles(folder))


def test_the_publisher_says_how_unless_the_user_does(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    for config, expected in (
        (None, SamplingOptions(temperature=0.8, top_p=0.95)),
        ({}, SamplingOptions(temperature=0.8, top_p=0.95)),
        (given, SamplingOptions(**given)),
        ({"temperature": 0.6, "do_sample": False}, SamplingOptions(temperature=0.0, top_p=0.95)),
        ({"temperature": "hot", "top_k": True, "top_p": None}, SamplingOptions(temperature=0.8, top_p=0.95)),
        ({"top_k": -1}, SamplingOptions(top_k=0)),
    ):
        with case(config):
            assert usual(tmp_path, config) == expected
    found = AskedSampling(temperature=0.0, top_k=5).over(usual(tmp_path, given))
    assert found == SamplingOptions(**{**given, "temperature": 0.0, "top_k": 5})


def test_values_out_of_range_name_their_file_or_option(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p: found 2"):
        usual(tmp_path, {"top_p": 2})
    with pytest.raises(RunError, match="--repetition-penalty: found 0"):
        AskedSampling(repetition_penalty=0.0).over(SamplingOptions())
