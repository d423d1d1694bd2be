"""Tiny checkpoints with a prediction layer, and what it predicts by transformers' own layers.

transformers builds no prediction layer. A second checkpoint therefore has its weights in place of a decoder layer of
the same kind; that layer, run by transformers, and a few lines of torch around it are the reference.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from support.families import Tiny, original, text_values, with_text, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
# Names of what is the layer's own, `{layers}` before a decoder layer's number and `{n}` the number of decoder layers.
NEXTN = {
    "layer": "{layers}{n}.",
    "project": "{layers}{n}.eh_proj.weight",
    "embed_norm": "{layers}{n}.enorm.weight",
    "hidden_norm": "{layers}{n}.hnorm.weight",
    "norm": "{layers}{n}.shared_head.norm.weight",
    "embed": "{layers}{n}.embed_tokens.weight",
    "head": "{layers}{n}.shared_head.head.weight",
}
MTP = {
    "layer": "mtp.layers.0.",
    "project": "mtp.fc.weight",
    "embed_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "norm": "mtp.norm.weight",
}


@dataclass(frozen=True)
class Predicting:
    """A row: a tiny model, its names, and whether embedding and head of the layer differ from the model's."""

    tiny: Tiny
    names: dict[str, str]
    has_own_tables: bool = False

    def __str__(self) -> str:
        return f"{self.tiny.family}{', own tables' if self.has_own_tables else ''}"


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
PREDICTING = (
    Predicting(Tiny("deepseek_v3", "a prediction layer"), NEXTN),
    Predicting(Tiny("deepseek_v3", "yarn", {"rope_parameters": _YARN | {"rope_theta": 1e4}}), NEXTN, True),
    Predicting(Tiny("deepseek_v32", "a prediction layer"), NEXTN),
    Predicting(Tiny("glm4_moe", "a prediction layer", {"use_qk_norm": True}), NEXTN),
    Predicting(Tiny("glm4_moe_lite", "a prediction layer"), NEXTN),
    Predicting(Tiny("glm4v_moe", "a prediction layer"), NEXTN),
    Predicting(Tiny("hy_v3", "a prediction layer"), NEXTN),
    Predicting(Tiny("qwen3_next", "a prediction layer"), MTP),
    Predicting(Tiny("qwen3_next", "experts in one tensor", fused=True), MTP),
    Predicting(Tiny("qwen3_5_moe_text", "a prediction layer"), MTP),
    Predicting(Tiny("qwen3_5_moe", "a prediction layer"), MTP),
)


def write_predicting(row: Predicting, folder: Path) -> Path:
    """Writes the checkpoint of a row."""
    write(row.tiny, folder)
    tensors = load_file(folder / FILE)
    layers, n, like = _places(folder, tensors)
    names = _named(row, layers, n)
    generator = torch.Generator().manual_seed(11)

    def shuffled(tensor: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].view(tensor.shape).contiguous()

    begin = f"{layers}{like}."
    made = {names["layer"] + name.removeprefix(begin): shuffled(tensors[name]) for name in _of(tensors, begin)}
    embed, head = (next(name for name in tensors if name.endswith(end)) for end in _TABLES)
    norm = next(name for name in tensors if name.endswith(("model.norm.weight", "language_model.norm.weight")))
    d = tensors[norm].shape[0]
    made[names["project"]] = (torch.randn((d, 2 * d), generator=generator) * 0.15).to(tensors[norm].dtype)
    made |= {names[role]: shuffled(tensors[norm]) for role in ("embed_norm", "hidden_norm", "norm")}
    for role, name in (("embed", embed), ("head", head)):
        if role in names:
            made[names[role]] = shuffled(tensors[name]) if row.has_own_tables else tensors[name].clone()
    save_file(tensors | made, folder / FILE)
    values = json.loads((folder / "config.json").read_text())
    if row.names is NEXTN:
        values = with_text(values, text_values(values) | {"num_nextn_predict_layers": 1})
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_table(folder: Path, share_known: float = 1.0) -> Path:
    """Writes a GLM-4.5 whose next token follows from the last one alone, by a table that its prediction layer knows.

    Attention and experts add nothing; the projection passes the embedding on. So the layer predicts from token i + 1
    what the model predicts from it. The layer's own embedding is another for some tokens, which it thus gets wrong.
    """
    write_predicting(Predicting(Tiny("glm4_moe", "a table"), NEXTN), folder)
    tensors = load_file(folder / FILE)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    embed, n = tensors["model.embed_tokens.weight"], 3
    vocab, d = embed.shape
    follows = torch.randperm(vocab, generator=torch.Generator().manual_seed(2))
    tensors["lm_head.weight"][follows] = embed
    tensors[f"model.layers.{n}.shared_head.head.weight"].copy_(tensors["lm_head.weight"])
    tensors[f"model.layers.{n}.eh_proj.weight"].copy_(torch.cat((torch.eye(d), torch.zeros(d, d)), dim=1))
    own = tensors[f"model.layers.{n}.embed_tokens.weight"]
    own.copy_(embed)
    first_unknown = int(vocab * share_known)
    own[first_unknown:] = -own[first_unknown:]
    save_file(tensors, folder / FILE)
    return folder


_TABLES = ("embed_tokens.weight", "lm_head.weight")


def _of(tensors: Tensors, begin: str) -> list[str]:
    return sorted(name for name in tensors if name.startswith(begin))


def _named(row: Predicting, layers: str, n: int) -> dict[str, str]:
    return {role: name.format(layers=layers, n=n) for role, name in row.names.items()}


def _places(folder: Path, tensors: Tensors) -> tuple[str, int, int]:
    """What names of decoder layers begin with, how many layers there are, and the last with attention and experts."""
    layers = next(name[: name.index("layers.0.") + len("layers.")] for name in sorted(tensors) if "layers.0." in name)
    n = text_values(json.loads((folder / "config.json").read_text()))["num_hidden_layers"]
    kinds = ("self_attn", "mlp.experts")
    alike = [i for i in range(n) if all(_of(tensors, f"{layers}{i}.{kind}") for kind in kinds)]
    return layers, n, alike[-1]


class Reference:
    """The prediction layer of a row's checkpoint.

    Args:    spare: a folder for the second checkpoint.
    """

    def __init__(self, row: Predicting, folder: Path, spare: Path) -> None:
        tensors = load_file(folder / FILE)
        layers, n, like = _places(folder, tensors)
        self._names, self._like = _named(row, layers, n), like
        self._own = {role: tensors[name].float() for role, name in self._names.items() if name in tensors}
        self._is_centered = row.names is MTP  # Qwen's norms are stored less 1
        alone = {name: tensor for name, tensor in tensors.items() if not name.startswith((f"{layers}{n}.", "mtp."))}
        part = {
            f"{layers}{like}." + name.removeprefix(self._names["layer"]): tensors[name]
            for name in _of(tensors, self._names["layer"])
        }
        part = {name: tensor for name, tensor in part.items() if name in alone}
        self._main = _loaded(folder, spare / "main", alone)
        self._layer = _loaded(folder, spare / "layer", alone | part)
        config: Any = self._main.config
        self._eps = getattr(config, "text_config", config).rms_norm_eps

    @torch.no_grad()
    def logits(self, ids: list[int], most: int) -> torch.Tensor:
        """The logits of the tokens after `ids`, each after the most likely one before it, [most, vocabulary]."""
        main: Any = self._main
        embed = self._own.get("embed", main.get_input_embeddings().weight)
        head = self._own.get("head", main.get_output_embeddings().weight)
        hidden = main.model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state[0]
        tokens, rows = ids[1:], []
        for _ in range(most):
            both = self._norm(embed[torch.tensor(tokens)], "embed_norm"), self._norm(hidden, "hidden_norm")
            x = self._norm(self._run(torch.cat(both, dim=1) @ self._own["project"].T)[-1:], "norm")
            rows.append((x @ head.T)[0])
            tokens, hidden = [*tokens, int(rows[-1].argmax())], torch.cat((hidden, x))
        return torch.stack(rows)

    def _norm(self, x: torch.Tensor, role: str) -> torch.Tensor:
        weight = self._own[role] + (1.0 if self._is_centered else 0.0)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._eps) * weight

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        modules = dict(self._layer.named_modules())
        (name,) = (name for name in modules if name.endswith(f".layers.{self._like}"))
        rotary: Any = modules[name.removesuffix(f"layers.{self._like}") + "rotary_emb"]
        positions, mask = torch.arange(len(x))[None], torch.full((len(x), len(x)), -torch.inf).triu(1)
        y: Any = modules[name](
            x[None],
            position_embeddings=rotary(x[None], positions),
            attention_mask=mask[None, None],
            position_ids=positions,
        )
        made: torch.Tensor = (y if isinstance(y, torch.Tensor) else y[0])[0]
        return made


def _loaded(source: Path, folder: Path, tensors: Tensors) -> PreTrainedModel:
    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder / "config.json")
    save_file(tensors, folder / FILE, {"format": "pt"})
    return original(folder)
