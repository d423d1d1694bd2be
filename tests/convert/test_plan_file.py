"""`plan.json`: what is written is read back, and every way in which one is none is told by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import case
from support.specs import GROUPED

from moe_pack.convert.plan import Decision, plan_bytes, plan_file, read_plan
from moe_pack.formats import BF16, ExpertFormat, Plan, PlanError, Selector, dense_roles, part_format, uniform_plan
from moe_pack.formats.pack.plans import uniform_dense
from moe_pack.formats.parts.specs import SELECTORS


def mixed(selector: Selector = "up", theta: float | None = None) -> Decision:
    """Two formats, a sparsity for each expert, dense matrices at 8 bits but for the head at 4."""
    fine, coarse = part_format(3, 16, 8), part_format(2, 64)
    formats = ExpertFormat(BF16, coarse, fine), ExpertFormat(coarse, fine, BF16)
    experts = tuple(tuple(formats[(l + e) % 2] for e in range(6)) for l in range(2))
    dense = tuple(
        part_format(4, 64) if role.name == "head" else part
        for role, part in zip(dense_roles(GROUPED), uniform_dense(GROUPED, part_format(8, 64)), strict=True)
    )
    sparsity = np.arange(12, dtype=np.float64).reshape(2, 6) / 13
    return Decision(Plan(selector, "hqq", experts, dense), sparsity, theta)


def written(folder: Path, decision: Decision) -> Path:
    path = folder / "plan.json"
    path.write_bytes(plan_bytes(decision, GROUPED))
    return path


def test_a_decision_is_read_back_as_it_was_written(new_folder: Callable[[], Path]) -> None:
    for selector in SELECTORS:
        for theta in [None, 0.25]:
            with case(selector, theta):
                tmp_path = new_folder()
                decision = mixed(selector, theta)
                found = read_plan(written(tmp_path, decision), GROUPED)
                assert found.plan == decision.plan
                assert found.sparsity.tolist() == decision.sparsity.tolist()
                assert found.theta == theta


def test_where_all_neurons_run_no_shares_are_written(tmp_path: Path) -> None:
    path = written(tmp_path, replace(mixed(), sparsity=np.zeros((2, 6))))
    assert json.loads(path.read_text())["sparsity"] == []
    assert not read_plan(path, GROUPED).sparsity.any()


def test_the_whole_file_by_hand(tmp_path: Path) -> None:
    plan = uniform_plan(GROUPED, "gate", part_format(4, 64), BF16)
    bf16 = {"codec": "bf16", "group": 0, "scale_bits": 16, "width": 16}
    assert json.loads(written(tmp_path, Decision(plan, np.full((2, 6), 0.5), 0.25)).read_text()) == {
        "format": "moe-pack plan",
        "version": 1,
        "selector": "gate",
        "quantizer": "hqq",
        "formats": [{"gate": {"codec": "affine", "group": 64, "scale_bits": 16, "width": 4}, "up": bf16, "down": bf16}],
        "experts": [[0] * 6] * 2,
        "dense": [],
        "sparsity": [[0.5] * 6] * 2,
        "theta": 0.25,
    }


def test_a_format_stands_once_however_many_experts_have_it(tmp_path: Path) -> None:
    values = json.loads(written(tmp_path, mixed()).read_text())
    assert len(values["formats"]) == 2
    assert values["experts"] == [[0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0]]


Changes = dict[str, Any]  # by place, as `formats.0.up.width`: what is put there
GONE = object()
OTHER = "expected format 'moe-pack plan', version 1; make it with moe-pack plan -o"
ONE_BIT, EIGHT_BITS = ({"codec": "affine", "width": width, "group": 64, "scale_bits": 16} for width in (1, 8))
NO_ONE_BIT = "width 1 has no absmax quantization; use hqq or nearest"
LISTS = "sparsity: expected 2 lists of 6 shares, one list for each layer"
SHARES = "sparsity: expected shares of at least 0 and less than 1"
THETA = "expected at least 0 and less than 1e30"
# What is changed, what is said of it, and the nearest change that passes.
REJECTED: list[tuple[Changes, str, Changes]] = [
    ({"format": "plan"}, OTHER, {"format": "moe-pack plan"}),
    ({"version": 2}, OTHER, {"version": 1}),
    ({"note": 1}, "unknown key 'note'", {}),
    ({"theta": GONE}, "key 'theta' is missing", {"theta": None}),
    ({"formats.0.up.bits": 2}, "formats[0]: up: unknown key 'bits'", {"formats.0.up.width": 2}),
    ({"dense.0.name": GONE}, "dense[0]: key 'name' is missing", {"dense.0": GONE}),
    ({"selector": "down"}, "selector: found 'down', expected one of up, gate, both, none", {"selector": "both"}),
    ({"quantizer": "gptq"}, "quantizer: found 'gptq', expected one of hqq, absmax, nearest, calibrated",
     {"quantizer": "nearest"}),
    ({"experts.1.5": 2}, "experts: found format 2, expected a number from 0 to 1", {"experts.1.5": 1}),
    ({"experts.0.0": -1}, "experts: found format -1, expected a number from 0 to 1", {"experts.0.0": 0}),
    ({"experts.0.0": True}, "experts[0][0]: found True, expected int", {"experts.0.0": 1}),
    ({"experts.1": GONE}, "1 layers planned, but the model has 2 with experts", {}),
    ({"experts.1.5": GONE}, "layer 1: 5 experts planned, but the model has 6", {}),
    ({"quantizer": "absmax", "formats.1.down": ONE_BIT}, f"formats[1]: {NO_ONE_BIT}",
     {"quantizer": "nearest", "formats.1.down": ONE_BIT}),
    ({"quantizer": "absmax", "dense.2.format": ONE_BIT}, f"dense[2]: {NO_ONE_BIT}", {"quantizer": "absmax"}),
    ({"formats.0.up.group": 128}, "layer 0 expert 0 up: group size 128 does not divide rows of 64 values",
     {"formats.0.up.group": 32}),
    ({"formats.0.gate": None}, "layer 0 expert 0: format of gate does not fit the model's matrices", {}),
    ({"dense.0.name": "layers.9.attention.q"}, "dense: the model has no matrix 'layers.9.attention.q'",
     {"dense": [{"name": "layers.1.attention.q", "format": EIGHT_BITS}]}),
    ({"dense.0.name": "layers.0.router"}, "dense layers.0.router: must not be quantized", {"dense.0.name": "embed"}),
    ({"dense": [{"name": "embed", "format": EIGHT_BITS}] * 2}, "dense: 'embed' is listed twice",
     {"dense": [{"name": "embed", "format": EIGHT_BITS}]}),
    ({"sparsity.1": GONE}, LISTS, {"sparsity": []}),
    ({"sparsity.0.6": 0.5}, LISTS, {"sparsity.0.5": 0.5}),
    ({"sparsity.0.0": 1}, SHARES, {"sparsity.0.0": 0.999}),
    ({"sparsity.0.0": -0.01}, SHARES, {"sparsity.0.0": 0}),
    ({"sparsity.0.0": "0.5"}, "sparsity[0][0]: found '0.5', expected float", {"sparsity.0.0": 0.5}),
    ({"theta": -0.1}, f"theta: found -0.1, {THETA}", {"theta": 0}),
    ({"theta": 1e30}, f"theta: found 1e+30, {THETA}", {"theta": 9e29}),
]  # fmt: skip


def changed(folder: Path, changes: Changes) -> Path:
    path = written(folder, mixed())
    values = json.loads(path.read_text())
    for place, value in changes.items():
        *outer, last = (int(key) if key.isdigit() else key for key in place.split("."))
        held = reduce(getitem, outer, values)
        if value is GONE:
            del held[last]
        elif last == len(held):  # the place behind a list's last
            held.append(value)
        else:
            held[last] = value
    path.write_text(json.dumps(values))
    return path


def test_what_is_no_plan_for_this_model_is_refused_and_the_nearest_that_is_one_is_read(tmp_path: Path) -> None:
    for changes, message, nearest in REJECTED:
        with case(changes):
            path = changed(tmp_path, changes)
            with pytest.raises(PlanError) as error:
                read_plan(path, GROUPED)
            assert str(error.value) == f"{path}: {message}"
            read_plan(changed(tmp_path, nearest), GROUPED)


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": "moe-pack plan", ')
    with pytest.raises(PlanError, match=r"plan\.json: not valid JSON \("):
        read_plan(path, GROUPED)


def test_a_file_too_long_to_be_a_plan_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, mixed())
    size = path.stat().st_size
    monkeypatch.setattr(plan_file, "MAX_PLAN_BYTES", size)
    read_plan(path, GROUPED)
    monkeypatch.setattr(plan_file, "MAX_PLAN_BYTES", size - 1)
    with pytest.raises(PlanError) as error:
        read_plan(path, GROUPED)
    assert str(error.value) == f"plan.json: {size:,} bytes, at most {size - 1:,}"
