"""Text models inside multimodal checkpoints: `within` makes the family of such a checkpoint from its text model's.

The text model is read from its object of `config.json` (`text_config`) by its own family. The other parts, which the
tensors' names show, are neither run nor packed: only images and sounds need them. `source.json` says so of each tensor.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from moe_pack import formats
from moe_pack.formats.families import family

Moves = Mapping[str, str]  # from the beginning of a name in the text model alone to that in the multimodal checkpoint
# Where transformers 5 puts the text model, and where most checkpoints of transformers 4 have it.
LANGUAGE_MODEL: tuple[Moves, ...] = (
    {"model.": "model.language_model."},
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)
# The beginnings of the names of other parts' tensors, and what these parts are.
PARTS: dict[str, str] = {
    f"{model}{name}.*": part
    for model in ("model.", "")
    for name, part in {
        "visual": "the vision part",
        "vision_tower": "the vision part",
        "vision_model": "the vision part",
        "multi_modal_projector": "what maps vision to the text model",
    }.items()
}
# Keys of the multimodal config, and of objects between it and the text model's, that concern other parts alone.
_OTHER_PARTS = family.keys(
    """
    audio_config audio_end_token_id audio_start_token_id audio_token_id audio_token_index boa_token_id boa_token_index
    boi_token_id boi_token_index eoa_token_id eoa_token_index eoi_token_id eoi_token_index image_end_token_id
    image_start_token_id image_token_id image_token_index video_end_token_id video_start_token_id video_token_id
    vision_config vision_end_token_id vision_start_token_id vision_token_id
    """
)


def within(
    text: family.Family,
    model_type: str,
    *,
    parts: Mapping[str, str] = PARTS,
    moves: tuple[Moves, ...] = LANGUAGE_MODEL,
    text_keys: tuple[str, ...] = ("text_config",),
    text_types: tuple[str, ...] = (),
    tied_head: bool = False,
    tied_by_text: bool = False,
    ignored_keys: frozenset[str] = frozenset(),
) -> family.Family:
    """Returns the family of multimodal checkpoints whose text model is one of the family `text`, without its models.

    Args:    parts: patterns of the names of other parts' tensors, and what these are.
             moves: ways in which checkpoints rename the text model's tensors; a name that no beginning fits stays.
             text_keys: the keys that lead to the text model's object.   text_types: other names of its `model_type`.
             tied_head: whether the head is tied if the object around the text model's does not say it.
             tied_by_text: whether the text model's own key ties it too.
             ignored_keys: keys of the multimodal config that change nothing for text.
    """

    def read_config(config: family.Config) -> formats.ModelSpec:
        *outer, values = _objects(config, text_keys)
        is_tied = outer[-1].flag("tie_word_embeddings", tied_head)
        values.choice("model_type", (text.model_type, model_type, *text_types))
        spec = text.read_config(values)
        is_tied = is_tied or (tied_by_text and spec.tied_head)
        values.ignore("tie_word_embeddings", "quantization_config")  # which is read before
        values.refuse_unread(text.ignored_keys)
        for around in outer:
            around.ignore("tie_word_embeddings", "quantization_config")
        for between in outer[1:]:
            between.refuse_unread(_OTHER_PARTS | ignored_keys)
        return replace(spec, tied_head=is_tied)

    renames = [partial(_moved, moves=each) for each in moves]
    return replace(
        text,
        model_type=model_type,
        short_names={},
        published=(),
        unpublished="",
        read_config=read_config,
        dense_names={
            role: tuple(dict.fromkeys(replace(way, name=rename(way.name)) for rename in renames for way in ways))
            for role, ways in text.ways.items()
        },
        expert_names=tuple(names.renamed(rename) for rename in renames for names in text.expert_names),
        table_names=tuple(family.renamed(names, rename) for rename in renames for names in text.table_names),
        dropped=(
            *(_moved_left_out(left_out, each) for each in moves for left_out in text.dropped),
            *(family.LeftOut(pattern, f"{part}, which a text model does not run") for pattern, part in parts.items()),
        ),
        unused=tuple(_moved_left_out(left_out, each) for each in moves for left_out in text.unused),
        prediction=tuple(family.renamed(names, rename) for rename in renames for names in text.prediction),
        ignored_keys=_OTHER_PARTS | ignored_keys,
        text_keys=text_keys,
        old_keys={},
    )


def _objects(config: family.Config, text_keys: tuple[str, ...]) -> list[family.Config]:
    """Returns the config, the objects on the way to the text model's, and that."""
    objects = [config]
    for key in text_keys:
        inner = objects[-1].group(key)
        if inner is None:
            raise formats.CheckpointError(
                f"{objects[-1].place}: key {key!r} is missing, expected the text model's object"
            )
        objects.append(inner)
    return objects


def _moved(name: str, moves: Moves) -> str:
    """Returns a name of the text model as the multimodal checkpoint has it."""
    return next((new + name[len(old) :] for old, new in moves.items() if name.startswith(old)), name)


def _moved_left_out(left_out: family.LeftOut, moves: Moves) -> family.LeftOut:
    sign, copy_of = (None if each is None else _moved(each, moves) for each in (left_out.sign, left_out.copy_of))
    return replace(left_out, pattern=_moved(left_out.pattern, moves), sign=sign, copy_of=copy_of)
