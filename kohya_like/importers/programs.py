"""Whose file it is: names that only one program writes, so that no file is taken for another program's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_SIGNS: dict[str, tuple[str, ...]] = {
    "SimpleTuner (a description of data)": ("aws_bucket_name",),
    "LyCORIS": ("target_module + module_algo_map", "apply_preset + algo"),
    "accelerate": ("compute_environment", "distributed_type + num_machines"),
    "diffusers (the description of a model)": ("_class_name",),
    "transformers (the description of a model)": ("architectures", "tokenizer_class"),
}
"""Names that only this program writes, several with + between them; a dot stands between a table, or a list of them, and its key."""


def owner(given: object) -> str | None:
    """The program whose signs a file's settings bear and whose files are not read here; None for any other."""
    found = _names(given)
    return next((program for program, signs in _SIGNS.items() if any(found.issuperset(sign.split(" + ")) for sign in signs)), None)


def _names(given: object) -> set[str]:
    """The names in a file: `key`, `table.key` and, for texts, `key=value`. Dashes before a name are a command line's; a table that is no
    list is only for the eye, so its names count alone as well."""
    found: set[str] = set()
    for key, value in _entries(given):
        name = key.lstrip("-")
        found |= {name, f"{name}={value}"} if isinstance(value, str) else {name, *(f"{name}.{inner}" for inner, _ in _entries(value))}
        if isinstance(value, Mapping):
            found |= _names({inner: item for inner, item in value.items() if not isinstance(item, Mapping | list)})
    return found


def _entries(given: object) -> Iterable[tuple[str, object]]:
    """The keys and values of a table, or of all tables of a list."""
    for table in given if isinstance(given, list) else [given]:
        if isinstance(table, Mapping):
            yield from ((str(key), value) for key, value in table.items())
