"""The names that a checkpoint gives its tensors, where they are not those that its family knows.

Wrappers of a model put their own names before or between those of its modules. A base model that is saved alone lacks
the first one. Some programs save one of several equal tensors under another's name. Each is the same model.
"""

import re
from collections.abc import Collection, Iterator

from moe_pack import formats
from moe_pack.formats.families.claiming import stored_ways
from moe_pack.formats.families.family import Family

# Wrappers in any place: of torch.compile, of sharded training, and of recomputed activations.
_WRAPPER = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_ADAPTER = re.compile(r"\.(lora_[A-Za-z]\w*|base_layer|modules_to_save|original_module)(\.|$)")
_ANCHORS = ("embed", "norm")  # roles that each checkpoint has once: their names show what stands before


def given_names(
    family: Family, spec: formats.ModelSpec, names: Collection[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the family's names of a checkpoint's tensors that have others, by these; and lines for users on them.

    Raises:  CheckpointError for tensors of an adapter that is not merged.
    """
    adapter = next((name for name in names if _ADAPTER.search(name)), None)
    if adapter is not None:
        raise formats.CheckpointError(
            f"checkpoint: tensor {adapter!r} is of an adapter that is not merged into the weights; merge it first with "
            "peft: model.merge_and_unload().save_pretrained(OUT)"
        )
    unwrapped = {name: _WRAPPER.sub("", name) for name in names}
    headed = _headed(family, spec, set(unwrapped.values()))
    renamed = {name: headed.get(new, new) for name, new in unwrapped.items()}
    shared = dict(_shared(family, spec, set(renamed.values())))
    notes = [
        f"note: tensor {new!r} is missing; {copy!r} is read in its place, because config.json says that they are equal"
        for copy, new in shared.items()
    ]
    others = {name: new for name, new in renamed.items() if name != new}
    if others:
        name, new = next(iter(others.items()))
        notes.append(f"note: {len(others)} tensors have other names than the model's: {name!r} is read as {new!r}")
    known = {name: shared.get(new, new) for name, new in renamed.items()}
    if len(set(known.values())) < len(known):  # two tensors with one name: the family's own check says what is wrong
        return {}, ()
    return {name: new for name, new in known.items() if name != new}, tuple(notes)


def _headed(family: Family, spec: formats.ModelSpec, names: Collection[str]) -> dict[str, str]:
    """Returns the names that begin in another way than the family's, and what they are with the family's beginning."""
    anchors = [way.name for role in _ANCHORS for way in stored_ways(family, spec, role)]
    if any(anchor in names for anchor in anchors):
        return {}
    ways = (way.name for role in formats.dense_roles(spec) for way in stored_ways(family, spec, role.name))
    expected = frozenset(name for way in ways for name in (way, f"{way}_packed"))
    best: dict[str, str] = {}
    for given, head in dict.fromkeys(_heads(names, anchors)):
        renamed = {n: head + n.removeprefix(given) for n in names if n.startswith(given) and n not in expected}
        if len(expected.intersection(renamed.values())) > len(expected.intersection(best.values())):
            best = renamed
    return best


def _heads(names: Collection[str], anchors: list[str]) -> Iterator[tuple[str, str]]:
    """Yields each beginning that some name has, and the one that the family has in its place."""
    for anchor in anchors:
        first, _, rest = anchor.partition(".")
        head, tail = (f"{first}.", rest) if "." in rest else ("", anchor)
        for name in names:
            if name == tail or name.endswith(f".{tail}"):
                given = name.removesuffix(tail)
                # `module.model.` for `model.` is `module.` for nothing, so that it goes from the head's name too.
                yield (given.removesuffix(head), "") if head and given.endswith(head) else (given, head)


def _shared(family: Family, spec: formats.ModelSpec, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields copies whose original is missing, and the original's name: some programs save equal tensors once."""
    for left_out in family.dropped:
        if left_out.copy_of is not None and left_out.copy_of not in names and left_out.pattern in names:
            yield left_out.pattern, left_out.copy_of
            return
    embeds, heads = (tuple(way.name for way in stored_ways(family, spec, role)) for role in ("embed", "head"))
    if spec.tied_head and not any(name in names for name in embeds):
        yield from ((name, embeds[0]) for name in heads if name in names)
