"""Options of writing captions with a model that looks at images."""

from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from .fields import Fraction, Section, Show, raise_all
from .tools import ReportOptions, ToolOptions

KEY_VARIABLE = "CAPTION_API_KEY"
"""Environment variable with the key of an endpoint: in no file, no command line and no log."""
TOY = "toy"
DESCRIBE = (
    "Describe this image in one or two plain sentences: the subject, what it does, the setting, light and style. "
    "Say only what can be seen, without a beginning such as 'The image shows'."
)
"""What a model that follows instructions is asked where nobody has said it."""
TASK = "<MORE_DETAILED_CAPTION>"
"""The same for Florence-2, which knows tasks."""


class CaptionSection(Section):
    """Which images get captions, who looks at them, and what is made of the words."""

    title: ClassVar[str] = "Captions"

    image_dir: Annotated[str, Show(kind="folder")]
    """Folder with the images, and those in the folders inside. Captions are written beside them; their history is kept in this folder."""
    image_list: Annotated[str | None, Show(kind="file")] = None
    """Caption only what this file names: JSON lines with `file_name` and, where it is another than the image's own name, `caption_file`.
    None takes all images in image_dir."""
    caption_extension: str = ".txt"
    """Ending of the caption files."""
    caption_model: Annotated[str, Show(basic=True, kind="folder", suggestions=(TOY,))]
    """Who looks at the images: a folder with a transformers model or its hub id (such as florence-community/Florence-2-large or
    Salesforce/blip2-opt-2.7b; docs/data.md has more), a folder with model.onnx and selected_tags.csv of a WD14 tagger (needs `pip install
    onnxruntime`), toy for the exact reader of the built-in toy worlds, or with endpoint the name that the model has there."""
    endpoint: Annotated[str | None, Show(basic=True)] = None
    """Address of a server that speaks the protocol of OpenAI's chat completions, such as http://127.0.0.1:11434/v1; the images are sent
    there. Its key is read from the environment variable CAPTION_API_KEY. None looks at them on this machine."""
    instruction: Annotated[str | None, Show(basic=True)] = None
    """What the model is asked, in words; for Florence-2 one of its tasks, such as <CAPTION>. None takes what suits the model."""
    overwrite: Annotated[bool, Show(basic=True)] = False
    """Also write anew what has a caption already; off writes only those that are missing or empty. The words before stay in the history,
    from which Undo brings them back."""
    trigger_word: Annotated[str, Show(basic=True)] = ""
    """Put before each caption that does not have it, with a comma between; empty puts nothing there."""
    replace_words: Annotated[tuple[str, ...], Show(basic=True)] = ()
    """Whole words to replace in what the model says, as old=new, for example a man=zwx man; done before the trigger word is put there."""
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 200
    """A caption ends after so many tokens at the latest; taggers know no tokens."""
    max_image_side: Annotated[int, Show(unit="px"), Field(ge=64, le=8192)] = 1024
    """Larger images are shrunk to this longer side before the model, or the endpoint, gets them."""
    caption_batch_size: Annotated[int, Field(ge=1, le=256)] = 1
    """Images that a model on this machine looks at together."""
    device: Literal["auto", "cpu"] = "auto"
    """auto takes a GPU where there is one, in bfloat16; cpu the processor."""
    general_threshold: Fraction = 0.35
    """Taggers: a tag is written from this probability on."""
    character_threshold: Fraction = 0.85
    """Taggers: the same for names of characters."""
    undesired_tags: tuple[str, ...] = ()
    """Taggers: tags that are never written."""
    remove_underscore: bool = True
    """Taggers: write long hair for long_hair; faces such as ^_^ stay as they are."""
    history_order: str | None = None
    """Name of this work in the history of captions. Given again, it goes on with the images that are left; Undo takes all of it back at
    once. None makes a new name."""

    @property
    def replacements(self) -> tuple[tuple[str, str], ...]:
        """replace_words in two."""
        return tuple((old.strip(), new.strip()) for old, _, new in (text.partition("=") for text in self.replace_words))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [
            f"replace_words: {text!r} is not old=new, such as a man=zwx man"
            for text in self.replace_words
            if "=" not in text or not text.partition("=")[0].strip()
        ]
        if self.endpoint is not None:
            problems += endpoint_problems(self.endpoint)
        if not self.caption_extension.strip(". ") or "/" in self.caption_extension or "\\" in self.caption_extension:
            problems.append(f"caption_extension: {self.caption_extension!r} is not the ending of a file, such as .txt")
        raise_all(problems)
        return self


def endpoint_problems(endpoint: str) -> list[str]:
    """What is wrong with an address."""
    try:
        parts = urlsplit(endpoint)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return [f"endpoint: {endpoint!r} is no address; give one such as http://127.0.0.1:11434/v1"]
    if not whole or any(ord(character) <= 32 or ord(character) > 126 for character in endpoint):
        return [f"endpoint: {endpoint!r} is no address; give one such as http://127.0.0.1:11434/v1"]
    if parts.username or parts.password:
        return [f"endpoint: without user and password; a key stands in the environment variable {KEY_VARIABLE}"]
    if parts.query or parts.fragment:
        return ["endpoint: without ? and #; give the address up to /v1"]
    return []


class CaptionImages(ToolOptions):
    """Write captions with a model that looks at the images: beside them, with a history, only where they are missing or for all."""

    name: ClassVar[str] = "caption"
    work: ClassVar[str] = "sd_scripts.library.tools.captioning:caption"
    script: ClassVar[str] = "caption.py"
    label: ClassVar[str] = "Write captions"
    tab: ClassVar[str] = "data"
    settled: ClassVar[tuple[str, ...]] = ("image_dir", "image_list", "caption_extension", "history_order")
    hub: ClassVar[tuple[str, ...]] = ("caption_model",)
    server: ClassVar[str] = "endpoint"
    renamed: ClassVar[dict[str, str]] = {
        "train_data_dir": "image_dir",
        "repo_id": "caption_model",
        "batch_size": "caption_batch_size",
        "thresh": "general_threshold",
        "onnx": "nothing: a tagger is always run by onnxruntime",
        "recursive": "nothing: folders inside are always looked through",
    }

    captions: CaptionSection
    report: ReportOptions = ReportOptions()

    @property
    def needs_device(self) -> bool:
        section = self.captions
        return section.endpoint is None and section.caption_model != TOY and section.device == "auto"
