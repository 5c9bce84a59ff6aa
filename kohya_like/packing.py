"""The page's modules in few files. Fifty files take a browser as long as all that is in them, and somebody far away as many trips.

The file of a module has it and what it imports, without what main.js has brought. Each module is run once: in `klModules` stands for each,
by its path, the promise of what it exports, and all files of a page look there. Imports and exports are statements at the beginning of a
line, in the forms that are read here; others are refused, and so is `export let`, whose changes nobody else would see.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping

FIRST = "main.js"
VENDOR = "vendor/"
_IMPORT = re.compile(r'^import (?:(?P<default>\w+)|\* as (?P<all>\w+)|\{(?P<some>[^}]*)\}) from "(?P<place>\.[^"]+)";$', re.M)
_EXPORT = re.compile(
    r"^export (?:(?P<default>default )|(?P<kind>(?:async )?function\*? |const |class )(?P<name>\w+)|\{(?P<some>[^}]*)\};$)", re.M
)
_LATER = re.compile(r'\bimport\("(\.[^"]+)"\)')
_LEFT = re.compile(r"^(?:import|export)\b.*", re.M)


def packed(modules: Mapping[str, str], name: str, address: str) -> str:
    """The file of one of the modules, which are given by their paths; address is the folder under which they are served.

    Raises ValueError for a statement of another form.
    """
    brought = set() if name == FIRST else set(_with_imports(modules, FIRST))
    parts = [_wrapped(modules, each, address) for each in _with_imports(modules, name) if each not in brought]
    vendors = dict.fromkeys(vendor for _, found in parts for vendor in found)
    heads = [f"import * as {_variable(vendor)} from {json.dumps(address + vendor)};" for vendor in vendors]
    begin, end = "const klModules = (globalThis.klModules ??= {});", f"const klModule = await klModules[{json.dumps(name)}];"
    given = (
        f"export default klModule.{each};" if each == "default" else f"export const {{ {each} }} = klModule;"
        for each in _exports(modules[name])
    )
    return "\n".join((*heads, begin, *(text for text, _ in parts), end, *given, ""))


def _with_imports(modules: Mapping[str, str], name: str, seen: set[str] | None = None) -> Iterator[str]:
    """A module behind all that it imports, in the order in which a browser runs them."""
    seen = set() if seen is None else seen
    if name in seen or name.startswith(VENDOR):
        return
    seen.add(name)
    for found in _IMPORT.finditer(modules[name]):
        yield from _with_imports(modules, _beside(name, found["place"]), seen)
    yield name


def _wrapped(modules: Mapping[str, str], name: str, address: str) -> tuple[str, list[str]]:
    """A module as a function that is called once, and the libraries that it imports."""
    vendors: list[str] = []

    def imported(found: re.Match[str]) -> str:
        place = _beside(name, found["place"])
        if place.startswith(VENDOR):
            vendors.append(place)
        source = _variable(place) if place.startswith(VENDOR) else f"(await klModules[{json.dumps(place)}])"
        if found["some"] is not None:
            return f"const {{{found['some'].replace(' as ', ': ')}}} = {source};"
        return f"const {found['all']} = {source};" if found["all"] else f"const {found['default']} = {source}.default;"

    text, exported = modules[name], _exports(modules[name])
    text = _IMPORT.sub(imported, text)
    text = _EXPORT.sub(lambda found: "const klDefault = " if found["default"] else (found["kind"] or "") + (found["name"] or ""), text)
    if left := _LEFT.search(text):
        raise ValueError(f"{name}: packing.py does not read {left[0]!r}")
    text = _LATER.sub(lambda found: f"import({json.dumps(address + _beside(name, found[1]))})", text)
    text = text.replace("import.meta.url", f"(location.origin + {json.dumps(address + name)})")
    given = ", ".join("default: klDefault" if each == "default" else each for each in exported)
    return f"klModules[{json.dumps(name)}] ??= (async () => {{\n{text}\nreturn {{ {given} }};\n}})();", vendors


def _exports(text: str) -> list[str]:
    names = list[str]()
    for found in _EXPORT.finditer(text):
        some = [each.strip() for each in (found["some"] or "").split(",") if each.strip()]
        names += ["default"] if found["default"] else some or [found["name"]]
    return names


def _beside(name: str, place: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), place))


def _variable(vendor: str) -> str:
    return "kl_" + re.sub(r"\W", "_", vendor)
