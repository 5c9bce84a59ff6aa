"""What every option is made of: a typed field, the text under it, and how the page shows it."""

import ast
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from .errors import shortened

VAST = 10**9
"""A limit that only nonsense passes; it is not told among what is allowed."""
Positive = Annotated[float, Field(gt=0, le=VAST)]
NotNegative = Annotated[float, Field(ge=0, le=VAST)]
Number = Annotated[float, Field(ge=-VAST, le=VAST)]
Rate = Annotated[float, Field(ge=0, le=100)]
"""A learning rate."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=VAST)]
Batch = Annotated[int, Field(ge=1, le=65536)]
"""Things that are worked on at once, or made beforehand for each thing."""
WholeNumber = Annotated[int, Field(ge=0, le=VAST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def expression(text: str) -> str:
    """The text, where it is a regular expression. Raises ValueError."""
    try:
        with warnings.catch_warnings():
            # "[[a]" means today what it says; what it may mean one day is no news for whoever typed it.
            warnings.simplefilter("ignore", FutureWarning)
            re.compile(text)
    except (re.error, RecursionError, OverflowError) as err:
        raise ValueError(
            f"{shortened(text)!r} is not a regular expression ({err}); a bracket that is meant as such has a \\ before it"
        ) from err
    return text


Expression = Annotated[str, AfterValidator(expression)]
"""A regular expression."""


Verdict = tuple[Literal["renamed", "not needed", "not supported"], str]
"""What became of another program's option, and the text that says it."""


@dataclass(frozen=True)
class Need:
    """One condition of an option: another one that is on, or off, has one of some values, or has none of them."""

    name: str
    values: tuple[str, ...] = ()
    but: bool = False
    off: bool = False


@dataclass(frozen=True)
class Show:
    """How the page shows a field; nothing here changes what the field means.

    basic fields stand at the top of the page, the others in the accordion of their section. cli_only fields are neither on the
    page nor in a TOML file: they widen what a configuration may do, so only the person at the command line may give them.
    """

    basic: bool = False
    unit: str = ""
    kind: Literal["", "folder", "file", "text", "start", "gpus"] = ""
    suggestions: tuple[str, ...] = ()
    cli_only: bool = False
    needs: str = ""
    """The option without which this one has no effect: `name` must be on (not None, not 0, not empty), `!name` off, `name=value|value` must
    have one of these values, `name!=value` any other; alternatives are joined by ` or `. Until then the field sleeps: see sleeping.py. A
    kind of run without that option never lets it sleep."""
    unless: str = ""
    """The option that may be given in its stead; one of the two is required, as a validator of the section says."""
    fold: str = ""
    """Heading under which the page folds the field away, together with the others of the same heading."""

    @property
    def conditions(self) -> tuple[Need, ...]:
        """What `needs` says; one of them is enough."""
        found = (re.fullmatch(r"(!?)(\w+)(?:(!?)=(.+))?", text) for text in self.needs.split(" or ") if text)
        return tuple(Need(one[2], tuple((one[4] or "").split("|")) if one[4] else (), bool(one[3]), bool(one[1])) for one in found if one)


@cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """The text under each field of a module's classes, by class and field. pydantic's own use_attribute_docstrings reads the file once for
    each class, which took a third of what loading all options takes."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _texts_of(node.body) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts_of(body: list[ast.stmt]) -> dict[str, str]:
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


class Section(BaseModel):
    """A group of options owned by one component, frozen; the text under each field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    title: ClassVar[str] = ""
    """Name of the accordion in which the page shows the section; sections may share one."""
    leading: ClassVar[tuple[str, ...]] = ()
    """Options that the page puts before the others, among them those that a section has of its own and not from the one it extends."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """An option that a section changes without a text of its own keeps the text of the section that this one extends."""
        own, above = (
            _texts(cls.__module__).get(cls.__qualname__, {}),
            [base.model_fields for base in cls.__mro__[1:] if issubclass(base, Section)],
        )
        for name, field in cls.model_fields.items():
            field.description = own.get(name) or field.description or next((seen[name].description for seen in above if name in seen), None)


class Options(BaseModel):
    """Everything that one script is told, nested by section; flat.py knows the options by their flat names."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    script: ClassVar[str]
    label: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {}
    """Names that other programs have for options of this script alone, and what to use instead."""
    verdicts: ClassVar[Mapping[str, Verdict]] = {}
    """What became of kohya's other names where that is something else than for other scripts (see legacy.py)."""
    estimates: ClassVar[bool] = False
    """Whether the script forecasts the memory that it will take (--estimate, --fit, --json)."""


def show_of(field: FieldInfo) -> Show:
    """The field's Show, or the default one."""
    return next((item for item in field.metadata if isinstance(item, Show)), Show())


def _split_size(value: Any) -> Any:
    """kohya writes a size as 1024, "1024", "1024,768" or [1024, 768] (width, height); what is none of these is left to pydantic."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        parts = tuple(part.strip() for part in value.replace("x", ",").split(",") if part.strip())
        return (parts * 2 if len(parts) == 1 else parts) or value
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    return tuple(value) if isinstance(value, list) else value


Side = Annotated[int, Field(ge=16, le=8192)]
Size = Annotated[tuple[Side, Side], BeforeValidator(_split_size)]
"""(width, height) in pixels."""


def raise_all(problems: list[str]) -> None:
    """Raises one ValueError with a line for each problem; does nothing when there is none."""
    if problems:
        raise ValueError("\n".join(problems))
