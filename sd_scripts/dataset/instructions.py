"""Which instructions are shown on which control pictures in a run, so that one look at the pictures serves all of their texts."""

from __future__ import annotations

from dataclasses import dataclass

from . import captions
from .plan import ControlSet, Plan, SampleRef, caption_of


@dataclass(frozen=True)
class Instructions:
    """All texts that one set of control pictures is shown with.

    picture and resolution are the first that has this set, and stand for every other of the same `Plan.control_set`.
    """

    picture: int
    resolution: int
    mirrored: bool
    texts: tuple[str, ...]
    """Each once, sorted."""


def instructions_of_run(plan: Plan, num_steps: int) -> list[Instructions]:
    """Every (control set, text) that training and validation will show in a run of num_steps steps.

    The sets come in the order of `Plan.cached_cuts`, the plain one of a picture before its mirrored one; which texts there are is as
    exact as in `texts_of_run`. Pictures without control pictures have a set too, the empty one.
    """
    found: dict[ControlSet, tuple[int, int, bool, set[str]]] = {}
    for picture, resolution in plan.cached_cuts():
        for mirrored in (False, True):
            found.setdefault(plan.control_set(picture, resolution, mirrored), (picture, resolution, mirrored, set()))

    def show(ref: SampleRef, text: str) -> None:
        found[plan.control_set(ref.picture, ref.resolution, plan.is_mirrored(ref))][3].add(text)

    rules = plan.caption_rules(num_steps)
    for batch in plan.validation_batches():
        for ref in batch:
            show(ref, caption_of(plan, rules, ref))
    bounded = _num_variants(plan, rules)
    if bounded is None or bounded > num_steps * plan.global_batch_size:
        for ref in plan.samples(num_steps):
            show(ref, caption_of(plan, rules, ref))
    else:
        for picture, resolution in plan.trained_cuts():
            own, item = rules[plan.pictures[picture].subset], plan.pictures[picture]
            texts = {
                captions.render(own, item.caption, plan.seed, plan.key_of(picture), variant)
                for variant in range(own.variants if own.random else 1)
            }
            if own.dropout_rate > 0 or own.dropout_every_n_epochs:
                texts.add("")
            for mirrored in (False, True) if plan.subset_of(picture).options.flip_aug else (False,):
                found[plan.control_set(picture, resolution, mirrored)][3].update(texts)
    return [
        Instructions(picture, resolution, mirrored, tuple(sorted(texts)))
        for picture, resolution, mirrored, texts in found.values()
        if texts
    ]


def _num_variants(plan: Plan, rules: tuple[captions.CaptionRules, ...]) -> int | None:
    """How many texts the trained pictures have at most; None where each sample may have one of its own."""
    if any(own.warmup_steps > 0 or (own.random and not own.variants) for own in rules):
        return None
    subsets = (plan.pictures[picture].subset for picture, _ in plan.trained_cuts())
    return sum(rules[subset].variants if rules[subset].random else 1 for subset in subsets)
