"""`plan.json`: what is written is read back, and every way in which one is none is told by name."""

import json
from collections.abc import Callable
from dataclasses import replace
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

Values = dict[str, Any]


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


Change = Callable[[Values], object]
ONE_BIT = {"codec": "affine", "width": 1, "group": 64, "scale_bits": 16}
OTHER = "expected format 'moe-pack plan', version 1; make it with moe-pack plan -o"
# What is changed, what is said of it, and the nearest change that passes.
REJECTED: dict[str, tuple[Change, str, Change]] = {
    "another format": (lambda v: v.update(format="plan"), OTHER, lambda v: v.update(format="moe-pack plan")),
    "another version": (lambda v: v.update(version=2), OTHER, lambda v: v.update(version=1)),
    "an unknown key": (
        lambda v: v.update(note=1),
        "unknown key 'note'",
        lambda v: None,
    ),
    "a missing key": (lambda v: v.pop("theta"), "key 'theta' is missing", lambda v: v.update(theta=None)),
    "an unknown key of a format": (
        lambda v: v["formats"][0]["up"].update(bits=2),
        "formats[0]: up: unknown key 'bits'",
        lambda v: v["formats"][0]["up"].update(width=2),
    ),
    "a missing key of a dense choice": (
        lambda v: v["dense"][0].pop("name"),
        "dense[0]: key 'name' is missing",
        lambda v: v["dense"].pop(0),
    ),
    "a selector of no kind": (
        lambda v: v.update(selector="down"),
        "selector: found 'down', expected one of up, gate, both, none",
        lambda v: v.update(selector="both"),
    ),
    "a quantizer of no name": (
        lambda v: v.update(quantizer="gptq"),
        "quantizer: found 'gptq', expected one of hqq, absmax, nearest, calibrated",
        lambda v: v.update(quantizer="nearest"),
    ),
    "a number of no format": (
        lambda v: v["experts"][1].__setitem__(5, 2),
        "experts: found format 2, expected a number from 0 to 1",
        lambda v: v["experts"][1].__setitem__(5, 1),
    ),
    "a negative number": (
        lambda v: v["experts"][0].__setitem__(0, -1),
        "experts: found format -1, expected a number from 0 to 1",
        lambda v: v["experts"][0].__setitem__(0, 0),
    ),
    "a number that is none": (
        lambda v: v["experts"][0].__setitem__(0, True),
        "experts[0][0]: found True, expected int",
        lambda v: v["experts"][0].__setitem__(0, 1),
    ),
    "too few layers": (
        lambda v: v["experts"].pop(),
        "1 layers planned, but the model has 2 with experts",
        lambda v: None,
    ),
    "too few experts": (
        lambda v: v["experts"][1].pop(),
        "layer 1: 5 experts planned, but the model has 6",
        lambda v: None,
    ),
    "one bit by absmax": (
        lambda v: (v.update(quantizer="absmax"), v["formats"][1]["down"].update(ONE_BIT)),
        "formats[1]: width 1 has no absmax quantization; use hqq or nearest",
        lambda v: (v.update(quantizer="nearest"), v["formats"][1]["down"].update(ONE_BIT)),
    ),
    "a dense matrix of one bit by absmax": (
        lambda v: (v.update(quantizer="absmax"), v["dense"][2]["format"].update(ONE_BIT)),
        "dense[2]: width 1 has no absmax quantization; use hqq or nearest",
        lambda v: v.update(quantizer="absmax"),
    ),
    "a format rows cannot hold": (
        lambda v: v["formats"][0]["up"].update(group=128),
        "layer 0 expert 0 up: group size 128 does not divide rows of 64 values",
        lambda v: v["formats"][0]["up"].update(group=32),
    ),
    "no format for a gate there is": (
        lambda v: v["formats"][0].update(gate=None),
        "layer 0 expert 0: format of gate does not fit the model's matrices",
        lambda v: None,
    ),
    "a dense matrix there is not": (
        lambda v: v["dense"][0].update(name="layers.9.attention.q"),
        "dense: the model has no matrix 'layers.9.attention.q'",
        lambda v: v.update(dense=[{**v["dense"][0], "name": "layers.1.attention.q"}]),
    ),
    "a dense tensor that must not be quantized": (
        lambda v: v["dense"][0].update(name="layers.0.router"),
        "dense layers.0.router: must not be quantized",
        lambda v: v["dense"][0].update(name="embed"),
    ),
    "a dense matrix named twice": (
        lambda v: v["dense"].append(v["dense"][0]),
        "dense: 'embed' is listed twice",
        lambda v: None,
    ),
    "shares of too few layers": (
        lambda v: v["sparsity"].pop(),
        "sparsity: expected 2 lists of 6 shares, one list for each layer",
        lambda v: v.update(sparsity=[]),
    ),
    "shares of too many experts": (
        lambda v: v["sparsity"][0].append(0.5),
        "sparsity: expected 2 lists of 6 shares, one list for each layer",
        lambda v: v["sparsity"][0].__setitem__(5, 0.5),
    ),
    "a share of 1": (
        lambda v: v["sparsity"][0].__setitem__(0, 1),
        "sparsity: expected shares of at least 0 and less than 1",
        lambda v: v["sparsity"][0].__setitem__(0, 0.999),
    ),
    "a share below 0": (
        lambda v: v["sparsity"][0].__setitem__(0, -0.01),
        "sparsity: expected shares of at least 0 and less than 1",
        lambda v: v["sparsity"][0].__setitem__(0, 0),
    ),
    "a share that is text": (
        lambda v: v["sparsity"][0].__setitem__(0, "0.5"),
        "sparsity[0][0]: found '0.5', expected float",
        lambda v: v["sparsity"][0].__setitem__(0, 0.5),
    ),
    "a negative threshold": (
        lambda v: v.update(theta=-0.1),
        "theta: found -0.1, expected at least 0 and less than 1e30",
        lambda v: v.update(theta=0),
    ),
    "a threshold beyond all": (
        lambda v: v.update(theta=1e30),
        "theta: found 1e+30, expected at least 0 and less than 1e30",
        lambda v: v.update(theta=9e29),
    ),
}


def changed(folder: Path, change: Change) -> Path:
    path = written(folder, mixed())
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return path


def test_what_is_no_plan_for_this_model_is_refused_and_the_nearest_that_is_one_is_read(
    new_folder: Callable[[], Path],
) -> None:
    for name in REJECTED:
        with case(name):
            tmp_path = new_folder()
            change, message, nearest = REJECTED[name]
            path = changed(tmp_path, change)
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
