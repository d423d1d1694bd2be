"""The face for Python: what pages show runs as it is shown, and importing it loads nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import case
from support.models import DEMO_MODEL, PackMaker

from moe_pack.formats.base.version import VERSION

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/python.md")


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


def test_snippets_run_as_they_are_shown(
    demo_pack: PackMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "packed").symlink_to(demo_pack("up", 4))
    monkeypatch.chdir(tmp_path)
    found = [(page, code) for page in PAGES for code in snippets(page) if "convert(" not in code]
    assert len(found) == 2
    for page, code in found:
        with case(page):
            exec(compile(code, page, "exec"), {})
            printed = capsys.readouterr().out
            assert len(printed) > 100
            assert "report()" not in code or re.search(r".+RunReport\(computed_by=", printed, re.DOTALL)


@pytest.mark.slow  # plans, converts and measures the demo model: two minutes
def test_convert_runs_as_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint").symlink_to(DEMO_MODEL)
    monkeypatch.chdir(tmp_path)
    (code,) = [code for code in snippets("docs/python.md") if "convert(" in code]
    exec(compile(code, "docs/python.md", "exec"), {})
    assert (tmp_path / "packed" / "manifest.json").exists()
    assert VERSION in capsys.readouterr().out


def test_importing_the_face_loads_nothing_and_the_room_stays_a_package() -> None:
    script = """
import sys
import moe_pack
loaded = [name for name in sys.modules if name.startswith("moe_pack.")]
assert loaded == [], loaded
assert moe_pack.__version__ and "torch" not in sys.modules
import moe_pack.convert.options
assert callable(moe_pack.convert) and moe_pack.convert.options
try:
    moe_pack.nothing
except AttributeError as fault:
    print(fault)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "module 'moe_pack' has no attribute 'nothing'\n"
