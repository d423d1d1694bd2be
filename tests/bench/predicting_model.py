"""Makes a trained model with a prediction layer, and measures how often its drafts are right.

    python tests/bench/predicting_model.py train -o predicting/ --minutes 8
    python tests/bench/predicting_model.py measure predicting/

Published models with such a layer have 30 billion parameters and more. This one is a GLM-4.5 with the weights of
tests/models/tiny-mixtral, whose experts, attention and embedding it takes over. The two models weigh experts in other
ways, so it is trained for some minutes, together with its prediction layer, by the sum of both losses (DeepSeek-V3,
2412.19437, section 2.2). The text is the first nine tenths of tests/data/books-valid.txt and what `--text` names; the
last tenth is held out. `train` goes on where it ended, if the folder has a model.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM

from moe_pack.convert import convert
from moe_pack.formats import BF16, Pack, uniform_plan
from moe_pack.formats.families import Checkpoint, PredictionLayer
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.drafts import Drafts
from moe_pack.runtime.drafts.prediction_layer import PredictionDrafter
from moe_pack.runtime.drafts.prediction_weights import PredictionWeights
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import Decoder, operations_for
from moe_pack.runtime.model.pack_weights import open_weights
from moe_pack.runtime.sampling import Sampler

TESTS = Path(__file__).parents[1]
BASE, BOOK = TESTS / "models" / "tiny-mixtral", TESTS / "data" / "books-valid.txt"
HELD_OUT = 0.1  # of the book, at its end
NUM_LAYERS, SIZE, VOCABULARY = 4, 128, 4096
CONTEXT, BATCH = 256, 8  # of training
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 128
STATE = "training.pt"


class Predicting(nn.Module):
    """The model, whose last layer is the prediction layer, and what that has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Glm4MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=SIZE,
            moe_intermediate_size=448,
            num_hidden_layers=NUM_LAYERS + 1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=1,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            norm_topk_prob=True,
            use_qk_norm=False,
        )
        self.model: Any = Glm4MoeForCausalLM(self.config)
        self.project = nn.Linear(2 * SIZE, SIZE, bias=False)
        self.norms = nn.ModuleDict(
            {name: nn.RMSNorm(SIZE, eps=1e-5) for name in ("enorm", "hnorm", "shared_head_norm")}
        )

    def begin(self) -> None:
        """Takes over the trained weights; the prediction layer begins as the last decoder layer."""
        theirs = load_file(BASE / "model.safetensors")
        own = self.model.state_dict()
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            own[name].copy_(theirs[name])
        for layer in range(NUM_LAYERS + 1):
            source, begin = f"model.layers.{min(layer, NUM_LAYERS - 1)}.", f"model.layers.{layer}."
            for name in (name for name in theirs if name.startswith(source) and "block_sparse_moe" not in name):
                own[begin + name.removeprefix(source)].copy_(theirs[name])
            moe = source + "block_sparse_moe."
            own[begin + "mlp.gate.weight"].copy_(theirs[moe + "gate.weight"])
            for expert in range(8):
                gate, down, up = (theirs[f"{moe}experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
                own[begin + "mlp.experts.gate_up_proj"][expert].copy_(torch.cat((gate, up)))
                own[begin + "mlp.experts.down_proj"][expert].copy_(down)
            own[begin + "mlp.shared_experts.down_proj.weight"].zero_()
        self.project.weight.data.copy_(torch.cat((torch.eye(SIZE), torch.eye(SIZE)), dim=1) / 2)

    def losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean loss of next tokens, and of those after them by the prediction layer, for ids [B, T]."""
        inner: Any = self.model.model
        x = embedded = inner.embed_tokens(ids)
        angles = inner.rotary_emb(x, torch.arange(ids.shape[1])[None])
        for layer in inner.layers[:NUM_LAYERS]:
            x = layer(x, position_embeddings=angles)
        normed = inner.norm(x)
        both = self.norms["enorm"](embedded[:, 1:]), self.norms["hnorm"](normed[:, :-1])
        cut = tuple(each[:, :-1] for each in angles)
        y = inner.layers[NUM_LAYERS](self.project(torch.cat(both, dim=-1)), position_embeddings=cut)
        y = self.norms["shared_head_norm"](y)
        return self._loss(normed[:, :-1], ids[:, 1:]), self._loss(y[:, :-1], ids[:, 2:])

    def _loss(self, x: Tensor, expected: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten())

    def save(self, folder: Path) -> None:
        """Writes the checkpoint as such models are published: the prediction layer is one behind the last."""
        self.model.to(torch.bfloat16).save_pretrained(folder)
        tensors, begin = load_file(folder / "model.safetensors"), f"model.layers.{NUM_LAYERS}."
        tensors[begin + "eh_proj.weight"] = self.project.weight.data.to(torch.bfloat16)
        for name, norm in self.norms.items():
            tensors[f"{begin}{name.replace('_norm', '.norm')}.weight"] = norm.state_dict()["weight"].to(torch.bfloat16)
        for name, table in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            tensors[f"{begin}{name}.weight"] = tensors[f"{table}.weight"].clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        values = json.loads((folder / "config.json").read_text())
        values |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1, "eos_token_id": 1}
        (folder / "config.json").write_text(json.dumps(values))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BASE / name, folder / name)


def tokens_of(text: str) -> Tensor:
    """Returns a text's tokens, int64 [T]."""
    return torch.tensor(AutoTokenizer.from_pretrained(BASE)(text)["input_ids"])


def book() -> tuple[str, str]:
    """Returns the text to train on, and the one that is held out."""
    text = BOOK.read_text(encoding="utf-8")
    cut = int(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


@click.group()
def main() -> None:
    """Trains the model, and measures it."""


@main.command()
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True)
@click.option("--minutes", type=float, default=8.0, show_default=True)
@click.option("--text", type=click.Path(path_type=Path, exists=True), multiple=True)
@click.option("--threads", type=int, default=2, show_default=True)
def train(out: Path, minutes: float, text: tuple[Path, ...], threads: int) -> None:
    """Trains for some minutes, and writes the checkpoint."""
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = Predicting()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.0)
    num_steps = 0
    if (out / STATE).exists():
        kept = torch.load(out / STATE)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        num_steps = kept["steps"]
    else:
        with torch.no_grad():
            model.begin()
    ids = torch.cat([tokens_of(each) for each in (book()[0], *(path.read_text(encoding="utf-8") for path in text))])
    generator, end = torch.Generator().manual_seed(num_steps), time.perf_counter() + 60 * minutes
    while time.perf_counter() < end:
        starts = torch.randint(len(ids) - CONTEXT, (BATCH,), generator=generator).tolist()
        loss, predicted = model.losses(torch.stack([ids[start : start + CONTEXT] for start in starts]))
        optimizer.zero_grad()
        (loss + predicted).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        num_steps += 1
        if num_steps % 20 == 0:
            click.echo(f"step {num_steps}: loss {loss.item():.3f}, of the prediction layer {predicted.item():.3f}")
    out.mkdir(exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": num_steps}
    torch.save(state, out / STATE)
    model.save(out)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
def measure(folder: Path) -> None:
    """Prints how many tokens a pass gives, by the length of drafts, on held-out text."""
    packed = folder / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    checkpoint = Checkpoint(folder)
    convert(checkpoint, uniform_plan(checkpoint.spec, "none", BF16, BF16), packed, 1)
    checkpoint.close()
    ids = tokens_of(book()[1]).tolist()
    starts = [i * (len(ids) - PROMPT_TOKENS) // PROMPTS for i in range(PROMPTS)]
    prompts = [ids[start : start + PROMPT_TOKENS] for start in starts]
    device = torch.device("cpu")
    with Pack(packed) as opened, operations_for(device, 1) as operations:
        weights, layer = open_weights(opened, device, operations), PredictionLayer.find(opened)
        assert layer is not None
        decoder = Decoder(weights, PROMPT_TOKENS + NEW_TOKENS)
        drafter = PredictionDrafter(PredictionWeights(layer, weights), PROMPT_TOKENS + NEW_TOKENS, decoder.chunk_tokens)
        for temperature in (0.0, 0.8):
            plain = [_answer(decoder, prompt, temperature, None) for prompt in prompts]
            decoder.sequences[0].follower = drafter
            for most in (1, 2, 4):
                drafts = Drafts(_Short(drafter, most), None)
                answers = [_answer(decoder, prompt, temperature, drafts) for prompt in prompts]
                assert answers == plain, "drafts change an answer"
                counts = drafts.counts
                click.echo(
                    f"temperature {temperature}, drafts of {most}: {counts.accepted / counts.drafted:.0%} of drafted "
                    f"tokens right, {counts.tokens_per_pass:.2f} tokens a pass"
                )
            decoder.sequences[0].follower = None


class _Short:
    """A drafter whose drafts have at most so many tokens."""

    needs_hidden = False

    def __init__(self, drafter: PredictionDrafter, most: int) -> None:
        self._drafter, self._most = drafter, most
        self.accepted, self.reset = drafter.accepted, drafter.reset

    def propose(self, ids: Any, hidden: Tensor | None, most: int) -> list[int]:
        return self._drafter.propose(ids, hidden, min(most, self._most))


def _answer(decoder: Decoder, prompt: list[int], temperature: float, drafts: Drafts | None) -> list[int]:
    decoder.reset()
    sampler = Sampler(SamplingOptions(temperature=temperature, seed=1))
    return list(generate(decoder, prompt, sampler, NEW_TOKENS, frozenset(), drafts))


if __name__ == "__main__":
    main()
