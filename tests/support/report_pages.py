"""Report pages for tests: profiles made by hand, the data in a page, and a browser that uses all that is drawn."""

import base64
import dataclasses
import hashlib
import json
import math
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from moe_pack.calib.forward import Array
from moe_pack.calib.forward.store import write_arrays
from moe_pack.calib.profile import Profile
from moe_pack.calib.profile.options import Sensitivity
from moe_pack.calib.profile.profiles import FORMAT, VERSION, ProfileFacts, TextFacts, facts_bytes, layer_file
from moe_pack.calib.sensitivity import MOST_COPIES, compared_formats, roundable_roles
from moe_pack.calib.statistics import LayerPredictors, learn_paths
from moe_pack.calib.statistics.popularity import count_pairs
from moe_pack.formats import ModelSpec
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.manifests import ContentFile, PackageVersion
from moe_pack.runtime.offload import Predictor
from support.models import TinyMixtral
from support.waiting import HANG_S

Values = dict[str, Any]


@dataclass(frozen=True)
class HandMade:
    """A profile of random numbers in the shapes of a real one; the last expert of the first layer has no token.

    `one_expert`: all tokens of every layer chose the first k experts.
    """

    L: int = 3
    E: int = 6
    k: int = 2
    f: int = 48
    num_sequences: int = 10
    sequence_length: int = 20
    num_held_out: int = 2
    sensitivity: str = "fast"
    name: str = "a text"
    one_expert: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.sequence_length

    def spec(self, folder: Path) -> ModelSpec:
        checkpoint = Checkpoint(TinyMixtral(intermediate_size=self.f).write(folder))
        checkpoint.close()
        spec = checkpoint.spec
        router = dataclasses.replace(spec.router, num_experts=self.E, num_experts_per_tok=self.k)
        return dataclasses.replace(spec, num_hidden_layers=self.L, moe_layers=tuple(range(self.L)), router=router)

    def routes(self) -> Array:
        """u16 [T, L, k]; of layer 0 and 2 alike in half of the tokens, so that paths predict something."""
        if self.one_expert:
            return np.tile(np.arange(self.k, dtype=np.uint16), (self.num_tokens, self.L, 1))
        generator = np.random.default_rng(1)
        scores = generator.gumbel(size=(self.num_tokens, self.L, self.E)) - 1.5 * np.arange(self.E) / self.E
        scores[: self.num_tokens // 2, 1:] += (
            4 * (np.arange(self.E) % 4 == np.arange(self.num_tokens // 2)[:, None] % 4)[:, None]
        )
        scores[:, 0, -1] = -np.inf
        return np.argsort(-scores, axis=2)[:, :, : self.k].astype(np.uint16)

    def write(self, folder: Path) -> Profile:
        spec = self.spec(folder.with_name(f"{folder.name}-model"))
        folder.mkdir()
        files = {layer_file("statistics", l): self.statistics(l) for l in range(self.L)}
        held_out = self.num_held_out * self.sequence_length
        learned = self.routes()[: self.num_tokens - held_out]
        files["paths.safetensors"] = learn_paths(learned, self.E, 1 << 20).arrays()
        if self.sensitivity != "none":
            files |= self.losses(spec)
        if self.num_held_out:
            files |= {layer_file("predictors", l): self.predictors(l) for l in range(1, self.L)}
        listed = []
        for name, arrays in sorted(files.items()):
            raw = write_arrays(arrays)
            (folder / name).write_bytes(raw)
            listed.append(ContentFile(name, len(raw), hashlib.sha256(raw).hexdigest()))
        text = TextFacts(self.name, "0" * 64, self.num_sequences, self.sequence_length, self.num_held_out, 0)
        made, level = (PackageVersion("torch", "2"),), cast("Sensitivity", self.sensitivity)
        facts = ProfileFacts(FORMAT, VERSION, spec, "0" * 64, text, (), "off", level, made, tuple(listed), "")
        (folder / "profile.json").write_bytes(facts_bytes(facts))
        return Profile(folder)

    def statistics(self, l: int) -> dict[str, Array]:
        generator, routes = np.random.default_rng(100 + l), self.routes()[:, l]
        tokens = np.bincount(routes.ravel(), minlength=self.E).astype(np.uint32)
        late = routes[self.num_tokens - self.num_held_out * self.sequence_length :]
        cosine = [math.nan, math.nan] if l == 0 else [0.5 + 0.4 * math.sin(l), 0.1]
        return {
            "tokens": tokens,
            "held_out_tokens": np.bincount(late.ravel(), minlength=self.E).astype(np.uint32),
            "mass": (tokens * generator.uniform(0.3, 0.7, self.E)).astype(np.float32),
            "routes": routes,
            "coactivation": count_pairs(routes, routes, self.E),
            "quantiles": np.sort(np.abs(generator.normal(0, 0.4 + 0.1 * l, (self.E, 3, 103))), axis=2).astype(
                np.float32
            ),
            "hot_thresholds": np.ones((self.E, 3, 4), np.float32),
            "hot": np.zeros((self.E, 3, 4, self.f), np.uint16),
            "cosine": np.asarray(cosine, np.float32),
            "input_squares": np.ones((self.E, TinyMixtral.hidden_size), np.float32),
            "hidden_squares": np.ones((self.E, self.f), np.float32),
        }

    def losses(self, spec: ModelSpec) -> dict[str, dict[str, Array]]:
        files, scale = {}, np.asarray([1, 0.3, 0.08, 0.0004])
        for l in range(self.L):
            generator = np.random.default_rng(200 + l)
            files[layer_file("sensitivity", l)] = {
                "dense": generator.uniform(0, [1e-5, 1e-3], (len(roundable_roles(spec, l)), 2)).astype(np.float32),
                "quantized": (generator.lognormal(0, 1, (self.E, 3, 4)) * scale * 1e-4).astype(np.float32),
                "sparse": (generator.lognormal(0, 1, (self.E, 3, 4)) * [1, 3, 6, 20] * 1e-5).astype(np.float32),
                "ratios": np.ones((3, len(compared_formats(spec.hidden_size))), np.float32),
                "repeated": np.zeros((self.E, 4), np.float32),
                "calibrated": np.zeros(0, np.float32),
            }
        generator = np.random.default_rng(300)
        files["effects.safetensors"] = {
            "growth": generator.uniform(0.5, 2, self.L).astype(np.float32),
            "embedding": np.asarray([1e-5, 2e-4], np.float32),
            "head": np.asarray([2e-5, 4e-3], np.float32),
            "copies": np.ones((min(MOST_COPIES, self.L), 2), np.float32),
            "nll_per_kl": np.ones(1, np.float32),
        }
        return files

    def predictors(self, l: int) -> dict[str, Array]:
        generator = np.random.default_rng(400 + l)
        recall = np.sort(generator.uniform(0.2, 0.9, 5))
        experts = np.full((6, 3), np.nan, np.float32)  # partial states were not judged
        experts[:5] = np.stack([recall, recall + 0.08, recall / 2], axis=1)
        neurons = generator.uniform(0.3, 0.95, (3, 4, 2)).astype(np.float32)
        neurons[2, 3] = np.nan
        zeros = torch.zeros((self.E, 8), dtype=torch.bfloat16)
        network = Predictor(zeros, torch.zeros((self.E, 1, self.E), dtype=torch.bfloat16), torch.zeros(self.E))
        return LayerPredictors(experts, neurons, np.asarray([4], np.uint8), network).arrays()


def held(page: str) -> Values:
    """The data in a page."""
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    values = json.loads(found.group(1))
    assert isinstance(values, dict)
    return values


def unpacked(packed: Values) -> Array:
    array: Array = np.frombuffer(base64.b64decode(packed["base64"]), {"f32": "<f4", "u32": "<u4"}[packed["dtype"]])
    return array.reshape(packed["shape"])


CHROMIUM = shutil.which("chromium")
# Clicks and moves everything there is, and keeps what tooltips said, by figure and title.
EXERCISE = """<script>
const found = {}, tipped = document.getElementById("tip");
function note(figure) {
  const [title, ...lines] = [...tipped.children].map(child => child.textContent);
  (found[figure] ||= {})[title] = lines;
}
function sweep(node, across, down) {
  node.scrollIntoView();
  const box = node.getBoundingClientRect();
  for (let i = 0; i < across; i++) for (let j = 0; j < down; j++) {
    const clientX = box.left + (i + 0.5) * box.width / across, clientY = box.top + (j + 0.5) * box.height / down;
    const event = new MouseEvent("mousemove", { bubbles: true, clientX, clientY });
    (document.elementFromPoint(clientX, clientY) || node).dispatchEvent(event);
    if (!tipped.hidden) note(node.getAttribute("aria-label"));
  }
  node.dispatchEvent(new MouseEvent("mouseleave"));
}
function slide() {
  for (const slider of document.querySelectorAll("input[type=range]")) for (const value of [0, 1, 500, 999, 1000]) {
    slider.value = value;
    slider.dispatchEvent(new Event("input"));
  }
}
for (const node of document.querySelectorAll("canvas, .chart svg")) sweep(node, 30, 8);
const radios = [...document.querySelectorAll("input[type=radio]")];
for (const input of radios) { input.click(); slide(); }
for (const list of document.querySelectorAll("select")) for (let i = 0; i < list.options.length; i++) {
  list.selectedIndex = i;
  list.dispatchEvent(new Event("change"));
}
for (const input of radios.reverse()) input.click();
for (const node of document.querySelectorAll("details")) { node.open = true; node.dispatchEvent(new Event("toggle")); }
redraw();
const pre = document.createElement("pre");
pre.id = "found";
pre.textContent = JSON.stringify(found);
document.body.append(pre);
document.body.dataset.exercised = "yes";
</script></body>"""


def browse(page: str, folder: Path) -> tuple[str, list[str]]:
    """The document after a browser ran the page, and what its console said."""
    assert CHROMIUM is not None
    path = folder / "page.html"
    path.write_text(page, "utf-8")
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet, "--enable-logging=stderr", "--v=0"]
    where = [f"--user-data-dir={folder / 'browser'}", "--window-size=1200,900", "--dump-dom", path.as_uri()]
    done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=HANG_S, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="the page is drawn by chromium, which is not installed")
