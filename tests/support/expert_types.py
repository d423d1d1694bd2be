"""Model types with experts in the installed transformers: how many there are, and why some of them do not run.

`found` reads the files of transformers' configs without importing them. Each type counts once, under the name that a
checkpoint's config.json has: of a multimodal model that is the outer one, and the types in it are its parts. `REASONS`
has a line for each type that is not a family yet. When it becomes a family, `faults` says to remove it.

    python tests/bench/family_table.py --docs

writes the count, the table of families and that of reasons into docs/families.md.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from moe_pack.formats import ModelSpec
from moe_pack.formats.families.family import Family
from moe_pack.formats.families.prediction import drafts_for
from moe_pack.formats.families.registry import model_types, modules
from support.models import TESTS

PAGE = TESTS.parent / "docs" / "families.md"
WRITER = "python tests/bench/family_table.py --docs"
WIDTH = 120

# The keys of all configs for the number of experts, or of experts that a token uses.
EXPERT_KEYS = frozenset(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
     "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
)  # fmt: skip
# Parts whose checkpoints are also published alone, so that they count on their own.
PUBLISHED_ALONE = ("step3p5",)
# Types that can have a part with experts, but refuse experts in it.
WITHOUT_EXPERTS = ("gemma4_assistant",)

Group = Literal["not a text decoder", "text decoder, not yet"]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a type is not a family: its published models, and what it has that this runtime lacks."""

    model_type: str
    models: str
    lacks: str
    group: Group = "text decoder, not yet"


# In the order of how many people are likely to run them.
REASONS: tuple[Reason, ...] = (
    Reason("glm5_next", "GLM-5.3-Flash",
        "latent attention to pooled positions that an indexer selects"),
    Reason("mistral_large4", "Mistral Large 4",
        "layers that may share keys and values, a learned scale of queries by position for each head, learned rotary "
        "frequencies"),
    Reason("muse_spark", "Muse Spark Open",
        "experts in a smaller space between two projections, with a norm of their input and of each output, learned "
        "gates of residuals, a normed embedding"),
    Reason("inkling_mm_model", "Inkling",
        "positions as learned biases that depend on the token, short convolutions of keys, values and both halves of "
        "a layer, shared experts weighted by the router"),
    Reason("inkling2", "Inkling 2",
        "as `inkling_mm_model`; also attention to earlier layers' outputs in place of residuals, convolutions with "
        "weights from the token, softcaps in neurons"),
    Reason("unlimited_ocr", "Unlimited-OCR",
        "a window over the answer, while the prompt is always seen; else `deepseek` as the text model"),
    Reason("dots3_note", "dots3-note",
        "latent attention that an indexer selects for in some layers and with a window and other sizes in the rest, "
        "a gate for each head, a norm of the rotated key"),
    Reason("nllb-moe", "NLLB-MoE-54B",
        "encoder and decoder with sinusoidal positions, attention with biases, and in every fourth layer ReLU "
        "experts with biases; both experts of a token have a capacity"),
    Reason("jetmoe", "JetMoE-8B", "experts in attention: the projections of queries and outputs are routed too"),
    Reason("zaya", "ZAYA1-8B",
        "convolutions of queries and keys, half of each value from the token before, a router with hidden layers "
        "that continues the state of the layer before, a choice without an expert, scaled residuals"),
    Reason("doge", "Doge 20M to 320M",
        "thousands of experts of one neuron each, found by two halves of a key; scores of attention with a bias from "
        "the values"),
    Reason("nemo_speechlm", "Nemotron 3.5 Transcribe",
        "the text model of `nemotron_h`, trained to write down speech: without sound there is nothing to write"),
    Reason("diffusion_gemma", "DiffusionGemma 26B-A4B",
        "diffusion: a block of 256 tokens is refined in several passes, tokens are not generated one by one",
        "not a text decoder"),
    Reason("openai_privacy_filter", "OpenAI Privacy Filter",
        "gives a label to each token of a text, and each token sees those after it; it generates nothing",
        "not a text decoder"),
    Reason("vitpose", "ViTPose++",
        "finds poses in images: a vision transformer whose expert is chosen by the name of a data set",
        "not a text decoder"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """A config's class in transformers: its folder, model type, own keys, base classes and parts.

    A part is the name of a class, or `=` and a model type.
    """

    folder: str
    model_type: str | None
    keys: frozenset[str]
    bases: tuple[str, ...]
    parts: tuple[str, ...]


def models_folder() -> Path:
    """The folder of all models in the installed transformers."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None, "the dev extra installs transformers"
    return Path(spec.origin).parent / "models"


@cache
def config_classes() -> dict[str, ConfigClass]:
    """Every config class of transformers, by its name."""
    classes = {}
    for path in sorted(models_folder().glob("*/configuration_*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = _read_class(path.parent.name, node)
    return classes


def _read_class(folder: str, node: ast.ClassDef) -> ConfigClass:
    model_type = None
    keys: set[str] = set()
    parts: list[str] = []
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            keys.add(statement.target.id)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            keys |= {argument.arg for argument in (*statement.args.args, *statement.args.kwonlyargs)}
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, statement.value
            if name == "model_type":
                model_type = ast.literal_eval(value)
            elif name == "attribute_map" and isinstance(value, ast.Dict):
                keys |= {str(word) for pair in ast.literal_eval(value).items() for word in pair}
            elif name in ("sub_configs", "sub_configs_defaults"):
                parts += _parts(value)
    bases = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
    return ConfigClass(folder, model_type, frozenset(keys), bases, tuple(parts))


def _parts(value: ast.expr) -> Iterator[str]:
    for node in ast.walk(value):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg == "model_type":
            yield f"={ast.literal_eval(node.value)}"


def _part_names(name: str) -> Iterator[str]:
    """The classes that a class has as its parts."""
    classes = config_classes()
    by_type = {each.model_type: other for other, each in classes.items() if each.model_type is not None}
    for part in classes[name].parts:
        other = by_type.get(part[1:]) if part.startswith("=") else part
        if other in classes:
            yield other


@cache
def _has_experts(name: str) -> bool:
    """Whether a class, one of its bases, or one of its parts has a key of experts."""
    each = config_classes()[name]
    related = (*(base for base in each.bases if base in config_classes()), *_part_names(name))
    return bool(each.keys & EXPERT_KEYS) or any(_has_experts(other) for other in related)


@cache
def parts() -> dict[str, str]:
    """The type that each part with experts belongs to.

    A part is defined in the same folder as its whole, or begins with the same name.
    """
    classes = config_classes()
    inside = {}
    for name, whole in classes.items():
        for part in _part_names(name):
            each = classes[part]
            named_alike = each.model_type is not None and each.model_type.startswith(f"{whole.model_type}_")
            if _has_experts(part) and (each.folder == whole.folder or named_alike):
                inside[part] = name
    for part in inside:
        while inside[part] in inside:
            inside[part] = inside[inside[part]]
    return {classes[part].model_type or part: classes[name].model_type or name for part, name in inside.items()}


@cache
def found() -> dict[str, str]:
    """The folder of each model type with experts, by the type that a checkpoint's config.json names."""
    return {
        each.model_type: each.folder
        for name, each in sorted(config_classes().items())
        if each.model_type is not None
        and _has_experts(name)
        and each.model_type not in WITHOUT_EXPERTS
        and (each.model_type not in parts() or each.model_type in PUBLISHED_ALONE)
    }


def unfound_folders() -> set[str]:
    """The folders of models with a class of experts, a second way to find them, of which no type was found."""
    experts = re.compile(r"^class \w*(Experts|MoE|Moe|SparseMLP)\w*\(", re.MULTILINE)
    paths = models_folder().glob("*/modeling_*.py")
    folders = {path.parent.name for path in paths if experts.search(path.read_text("utf-8"))}
    of_parts = {each.folder for each in config_classes().values() if each.model_type in parts()}
    return folders - set(found().values()) - of_parts


def supported() -> list[str]:
    """The types with experts that are families."""
    return [model_type for model_type in found() if model_type in model_types()]


def in_group(group: Group) -> list[Reason]:
    """The reasons of one group."""
    return [reason for reason in REASONS if reason.group == group]


def faults() -> list[str]:
    """What contradicts in families, reasons and transformers; each line says what to do."""
    reasons = [reason.model_type for reason in REASONS]
    here = "REASONS in tests/support/expert_types.py"
    return [
        *(f"{name}: is supported now; remove its reason from {here}" for name in reasons if name in model_types()),
        *(f"{name}: has two reasons in {here}" for name in sorted(set(reasons)) if reasons.count(name) > 1),
        *(
            f"{name}: has a reason, but no experts in transformers {library()}; remove it from {here}"
            for name in reasons
            if name not in found()
        ),
        *(
            f"{name}: has experts, but is no family and has no reason; add one to {here}"
            for name in found()
            if name not in model_types() and name not in reasons
        ),
    ]


def library() -> str:
    """The installed version of transformers, without its last number."""
    return ".".join(version("transformers").split(".")[:2])


def count_line() -> str:
    """How many types run, with the numbers of those that do not."""
    return (
        f"**{len(supported())} of {len(found())} model types with experts in transformers {library()} convert and "
        f"run**, {len(in_group('not a text decoder'))} more are not text decoders, and "
        f"{len(in_group('text decoder, not yet'))} are not done yet"
    )


def _beyond() -> str:
    """The families that are not in the count, and why."""
    known = {each.model_type for each in config_classes().values()}
    others = [name for name in model_types() if name not in found()]
    absent = [f"`{name}`" for name in others if name not in known]
    wholes = [f"`{name}`" for name in others if name in known and name not in parts()]
    inner = [f"`{name}` (a part of `{parts()[name]}`)" for name in others if name in parts()]
    told = [
        f"{', '.join(absent)} (transformers has none of these names)" if absent else "",
        f"{', '.join(wholes)} (its config may have any text model)" if wholes else "",
        *inner,
    ]
    return f"These families run too and are not in the count: {'; '.join(line for line in told if line)}."


def generated() -> dict[str, str]:
    """The parts of docs/families.md that are written from the data, by their names."""
    paragraph = f"{count_line()} ([why](#not-supported-and-why)). {_beyond()}"
    filled = textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)
    reasons = "\n\n".join((_table("text decoder, not yet"), _table("not a text decoder")))
    return {"count": filled, "families": _families(), "reasons": reasons}


def _families() -> str:
    """The table of families: the first paragraph of each module, which has models, a colon, and what is particular.

    A family runs on GPUs if they lack no part of any of its shapes (`support.families`).
    """
    from support.families import specs_of_shapes  # which imports transformers

    specs = specs_of_shapes()
    rows = [
        "| family | models | GPU | requests | drafts | what is particular |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in modules():
        module = import_module(f"moe_pack.formats.families.{name}")
        own = re.findall(r"^([A-Z]\w*) = ", Path(str(module.__file__)).read_text("utf-8"), re.MULTILINE)
        families = [each for key, each in vars(module).items() if key in own and isinstance(each, Family)]
        types = [each.model_type for each in families]
        first = " ".join(str(module.__doc__).partition("\n\n")[0].split()).removesuffix(".")
        models, _, particular = first.partition(": ")
        assert types and particular, f"{name}.py begins with its models, a colon, and what is particular"
        shapes = [spec for each in types for spec in specs[each]]
        runs = _runs(shapes, any(each.prediction for each in families) and all(map(drafts_for, shapes)))
        rows.append(f"| {', '.join(f'`{each}`' for each in types)} | {models} | {runs} | {particular} |")
    return "\n".join(rows)


def _runs(specs: list[ModelSpec], has_layer: bool) -> str:
    """The columns of a family that say where it runs, whether several requests do at once, and what drafts."""
    lacked = sorted({part for spec in specs for part in spec.lacks("gpu")})
    is_decoder = all(spec.encoder is None for spec in specs)
    drafts = "ngram, mtp" if has_layer else "ngram"
    on_gpu = f"no: {', '.join(lacked)}" if lacked else "yes"
    return f"{on_gpu} | {'yes' if is_decoder else 'no'} | {drafts if is_decoder else 'no'}"


def _table(group: Group) -> str:
    titles: dict[Group, str] = {
        "text decoder, not yet": "Text decoders that do not run yet, those first that most people are likely to run:",
        "not a text decoder": "Not text decoders, and not planned:",
    }
    rows = [f"| `{reason.model_type}` | {reason.models} | {reason.lacks} |" for reason in in_group(group)]
    header = {"text decoder, not yet": "what this runtime lacks", "not a text decoder": "what it is"}[group]
    return "\n".join((titles[group], "", f"| type | models | {header} |", "| --- | --- | --- |", *rows))


def with_generated(page: str) -> str:
    """The page with its generated parts written again."""
    for name, text in generated().items():
        begin, end = f"<!-- {name}: {WRITER} -->\n", f"\n<!-- end of {name} -->"
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        assert found_begin and found_end, f"docs/families.md has the two lines {begin.strip()} and {end.strip()}"
        page = f"{before}{begin}{text}{end}{after}"
    return page
