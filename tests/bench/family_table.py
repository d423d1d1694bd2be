"""Prints the family table: what was checked against transformers and with what result, sizes, what is refused.

    python tests/bench/family_table.py
    python tests/bench/family_table.py --docs

The first line counts the model types with experts in the installed transformers. After the families come the types that
are refused, each with its reason. `--docs` measures nothing: it writes the generated parts of docs/families.md.
Every tiny checkpoint of the cards in tests/families is made, packed in 16 bit and run against transformers (prefill,
token by token, 32 greedy tokens); every published config is read and counted; every config near a known one is tried.
Exit code 1 if anything fails.
"""

import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import benchlib  # first: it puts tests/support on the path
import click
import torch
from support.close import CLOSE, Close, refusal
from support.expert_types import PAGE, REASONS, count_line, faults, with_generated
from support.families import CARDS, TINY, Comparison, compare, is_bounded
from support.published import PUBLISHED, UNPUBLISHED, active, agrees, counted, spec_of, total
from tqdm import tqdm

from moe_pack.formats.families.family import Published
from moe_pack.formats.families.registry import model_types
from moe_pack.formats.parts.specs import cached_values, num_active_parameters, num_parameters

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Row:
    """A family's results: largest differences over its shapes, names of those that failed, models, refusals."""

    family: str
    num_shapes: int
    failed: list[str]
    prefill: float
    token_by_token: float
    models: list[dict[str, object]]
    refused: list[str]
    refused_wrongly: list[str]

    @property
    def passes(self) -> bool:
        """Whether every shape, every refusal and every published figure is as it should be."""
        return (
            not self.failed
            and not self.refused_wrongly
            and (bool(self.models) or self.family in UNPUBLISHED)
            and all(model["agrees"] for model in self.models)
        )


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, removed afterwards."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def measure(family: str) -> Row:
    """A family's row: all its shapes, refusals and published models, tried now."""
    if family not in CARDS:
        raise SystemExit(f"{family}: has no card; add it to CARDS of its file in tests/families")
    found: dict[str, Comparison] = {}
    for tiny in tqdm([tiny for tiny in TINY if tiny.family == family], desc=family, disable=None, leave=False):
        with folder() as path:
            found[tiny.name] = compare(tiny, path)
    refused: list[str] = []
    unlike: list[str] = []
    for close in [close for close in CLOSE if close.family == family]:
        with folder() as path:
            line = refusal(close, path)
        if line is not None and line.endswith(close.message):
            refused.append(written(close))
        else:
            unlike.append(f"{written(close)}: {'is accepted' if line is None else line}; expected: {close.message}")
    return Row(
        family=family,
        num_shapes=len(found),
        failed=[name for name, comparison in found.items() if not is_bounded(comparison, TOLERANCE)],
        prefill=max(comparison.prefill for comparison in found.values()),
        token_by_token=max(comparison.token_by_token for comparison in found.values()),
        models=[sizes(model) for model in PUBLISHED if spec_of(model).family == family],
        refused=refused,
        refused_wrongly=unlike,
    )


def written(close: Close) -> str:
    """What is unlike the family in a config: `key=value`, of an object its first value."""
    values = {
        key: next(iter(value.values())) if isinstance(value, dict) else value for key, value in close.changes.items()
    }
    return ", ".join(f"{key}={'...' if isinstance(value, list) else value}" for key, value in values.items())


def sizes(published: Published) -> dict[str, object]:
    """A published model's counts, and whether they agree with what its publisher prints."""
    spec = spec_of(published)
    cached = cached_values(spec)
    return {
        "model": published.name,
        "parameters": num_parameters(spec),
        "active_parameters": num_active_parameters(spec),
        "kv_bytes_per_token_16_bit": 2 * cached,
        "published": [published.total, published.active],
        "published_counts": counted(published),
        "agrees": agrees(total(published, spec), 1e9, published.total)
        and agrees(active(published, spec), 1e9, published.active)
        and (published.cached is None or agrees(cached, 1e3, published.cached)),
    }


def print_row(row: Row) -> None:
    """Prints a family's line, the configs it refuses, and whatever failed."""
    verdict = "pass" if row.passes else "FAIL"
    equal = "equal" if not row.failed else "see below"
    print(
        f"{row.family:12} {verdict:5} {row.num_shapes:6} {row.prefill:9.1e} {row.token_by_token:9.1e} {equal:>9} "
        f"{len(row.refused):8}"
    )
    for named in row.refused:
        print(f"{'':12} refused: {named}")
    missing = (
        []
        if row.models or row.family in UNPUBLISHED
        else ["no published model: give the family `published` or `unpublished`"]
    )
    for failed in [*row.failed, *row.refused_wrongly, *missing]:
        print(f"{'':12} FAIL  {failed}")


def print_models(rows: list[Row]) -> None:
    """Prints the table of published models."""
    print(f"\n{'model':22} {'parameters':>16} {'published':>9} {'active':>15} {'published':>9} {'KV bytes/token':>15}")
    for row in rows:
        for model in row.models:
            published = model["published"]
            assert isinstance(published, list), "two figures"
            print(
                f"{model['model']:22} {model['parameters']:>16,} {published[0] + ' B':>9} "
                f"{model['active_parameters']:>15,} {published[1] + ' B':>9} {model['kv_bytes_per_token_16_bit']:>15,}"
                f"{'' if model['agrees'] else '  DIFFERS'}"
            )
            if model["published_counts"]:
                print(f"{'':22} published: {model['published_counts']}")


def print_reasons() -> None:
    """Prints the model types with experts that are not families, and what contradicts in families and reasons."""
    print("\nrefused: model types with experts in transformers that are not families")
    for reason in REASONS:
        print(f"{reason.model_type:22} {reason.group}: {reason.lacks}")
    for fault in faults():
        print(f"{'':12} FAIL  {fault}")


def write_docs() -> None:
    """Writes the generated parts of docs/families.md; stops if families and reasons contradict."""
    if faults():
        raise SystemExit("\n".join(faults()))
    PAGE.write_text(with_generated(PAGE.read_text("utf-8")), encoding="utf-8")


@click.command(help=__doc__)
@click.option("--family", type=click.Choice(model_types()), help="This one alone.")
@click.option("--docs", is_flag=True, help="Write the generated parts of docs/families.md.")
@benchlib.json_option
def main(family: str | None, docs: bool, as_json: bool) -> None:
    """Measures and prints; exit code 1 if anything fails."""
    if docs:
        write_docs()
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not as_json:
        print(f"{count_line()}\n".replace("**", ""))
        print(f"{'family':12} {'':5} {'shapes':>6} {'prefill':>9} {'by token':>9} {'greedy':>9} {'refused':>8}")
    rows = []
    for name in [family] if family else model_types():
        rows.append(measure(name))
        if not as_json:
            print_row(rows[-1])
    if as_json:
        refused = [asdict(reason) for reason in REASONS]
        measured = [asdict(row) | {"passes": row.passes} for row in rows]
        print(json.dumps({"families": measured, "refused": refused}, indent=2))
    else:
        print_models(rows)
        if not family:
            print_reasons()
    raise SystemExit(0 if all(row.passes for row in rows) and (family or not faults()) else 1)


if __name__ == "__main__":
    main()
