"""What is written, where and how often."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .fields import Count, Section, Show, raise_all
from .files import names_device

_NOT_IN_NAMES = r"\x00-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff/\\:*?\"<>|"
"""What file systems refuse, and characters that nobody sees, some of which turn the rest of a name around."""


def _taken_everywhere(name: str) -> str:
    """A name that Windows takes too: files go there, and it cuts off what the name ends with."""
    if names_device(name):
        raise ValueError(f'"{name}" is the name of a device on Windows, where nobody could keep a file of this name; choose another one')
    if name.endswith((".", " ")):
        raise ValueError(f'"{name}" ends with a {"dot" if name.endswith(".") else "space"}, which Windows cuts off; write it without')
    return name


Name = Annotated[str, Field(pattern=rf"^[^{_NOT_IN_NAMES}.][^{_NOT_IN_NAMES}]{{0,119}}$"), AfterValidator(_taken_everywhere)]


class OutputOptions(Section):
    """Run folder, saved files, states, trackers, metadata."""

    title: ClassVar[str] = "Saving"
    if TYPE_CHECKING:

        @property
        def save_model_as(self) -> Any:
            """The form of what is saved; each kind of run has its own."""

    output_dir: Annotated[str, Show(basic=True, kind="folder")] = "output"
    """Folder of all runs; each run gets its own folder `<date>-<time>-<output_name>` in it."""
    output_name: Annotated[Name, Show(basic=True)] = "model"
    """Name of the saved files, without folder and ending."""
    save_every_n_steps: Annotated[Count | None, Show(unit="steps")] = None
    """Save every this many steps; None saves at the end only (and as save_every_n_epochs says)."""
    save_every_n_epochs: Annotated[Count | None, Show(unit="epochs")] = None
    """Save at the end of every N-th epoch."""
    save_n_epoch_ratio: Count | None = None
    """Save about this many times over the run, at ends of epochs."""
    save_last_n_steps: Annotated[Count | None, Show(unit="steps", needs="save_every_n_steps")] = None
    """Keep only files saved within the last N steps; one that is N steps old goes (kohya's scripts still keep it). None keeps all. The
    final file always stays."""
    save_last_n_epochs: Annotated[Count | None, Show(needs="save_every_n_epochs or save_n_epoch_ratio")] = None
    """Of the files saved at ends of epochs keep the last N; None keeps all. The final file always stays, and is one of them."""
    save_best: Annotated[bool, Show(needs="validation_split or dataset_config")] = False
    """Also keep the file of the lowest held-out loss so far as `<output_name>-best`, whatever else is removed. Needs validation_split."""
    early_stop_patience: Annotated[Count | None, Show(needs="save_best")] = None
    """End the run when so many held-out losses in a row were not lower than the lowest one before; None trains to the last step. Needs
    save_best, whose file is what stays, and the state is saved, so that the run can go on all the same."""
    save_precision: Literal["float", "fp16", "bf16"] = "fp16"
    """Precision of the saved file."""
    save_state: bool = True
    """Save the training state (optimizer, averages, step) with each saved file, so that the run can be continued from there."""
    save_state_every_n_steps: Annotated[Count | None, Show(unit="steps")] = None
    """Save the training state every this many steps as well."""
    save_state_on_train_end: bool = True
    """Save the training state when the run ends, so that it can be made longer later."""
    save_last_n_states: Count = 2
    """Keep this many newest training states."""
    huggingface_repo_id: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")] = None
    """Upload every saved file to this repository of the Hugging Face hub (owner/name, made when it is not there); None uploads nothing. The
    token is read from the environment variable HF_TOKEN, never from a file."""
    huggingface_repo_visibility: Annotated[Literal["private", "public"], Show(needs="huggingface_repo_id")] = "private"
    """Who may see a repository that is made for the upload."""
    huggingface_path_in_repo: Annotated[str, Show(needs="huggingface_repo_id")] = ""
    """Folder inside the repository; empty is its top."""
    log_with: Literal["none", "tensorboard", "wandb", "all"] = "none"
    """Also log to TensorBoard or Weights & Biases (its key is read from the environment variable WANDB_API_KEY, never from a file)."""
    log_tracker_name: Annotated[str | None, Show(needs="log_with!=none")] = None
    """Project name for the tracker; None takes output_name."""
    wandb_run_name: Annotated[str | None, Show(needs="log_with=wandb|all")] = None
    """Run name in Weights & Biases; None takes the name of the run folder."""
    metadata: Literal["all", "minimal"] = "all"
    """What is written into the saved file: all settings, data set and tag statistics, or only what other tools need to read it. Folder
    names and paths never are."""
    training_comment: Annotated[str | None, Show(needs="metadata=all")] = None
    """Free text in the metadata."""
    metadata_title: str | None = None
    """modelspec title; None takes output_name."""
    metadata_author: str | None = None
    """modelspec author."""
    metadata_description: str | None = None
    """modelspec description."""
    metadata_license: str | None = None
    """modelspec licence."""
    metadata_tags: str | None = None
    """modelspec tags, comma separated."""
    metadata_trigger_phrase: str | None = None
    """modelspec trigger phrase."""
    metadata_usage_hint: str | None = None
    """modelspec usage hint."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.save_every_n_epochs is not None and self.save_n_epoch_ratio is not None:
            raise_all(["save_every_n_epochs and save_n_epoch_ratio both say when to save by epochs; choose one"])
        return self

    @property
    def ending(self) -> str:
        """Ending of the saved files; a folder has none."""
        return ".safetensors"

    @property
    def has_all_parts(self) -> bool:
        """Whether what is saved holds networks that are not trained, too."""
        return not self.ending


class AdapterOutputOptions(OutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    output_name: Annotated[Name, Show(basic=True)] = "lora"
    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "kohya"
    """Names inside the saved .safetensors file. A LoRA is read whole with kohya's by ComfyUI, Forge, sd-scripts, diffusers; with
    diffusers' by diffusers; with comfyui's (`diffusion_model.`) by ComfyUI, Forge. verify_lora counts the layers of a file."""


class ModelOutputOptions(OutputOptions):
    """Run folder, saved models, states, trackers, metadata."""

    save_model_as: Literal["safetensors", "diffusers"] = "safetensors"
    """How the model is written. safetensors: one file in the model's original layout, which every tool reads (a transformer alone, where it
    is published so); diffusers: a folder with all parts, large weights split into several files."""

    @property
    def ending(self) -> str:
        """Ending of the saved files; a folder has none."""
        return ".safetensors" if self.save_model_as == "safetensors" else ""

    @model_validator(mode="after")
    def _folder_is_free(self) -> Self:
        if self.save_model_as == "diffusers" and self.output_name in ("state", "samples", "trackers", "profile"):
            raise_all([f"output_name: the run's folder has a folder {self.output_name} already; choose another name for the saved folder"])
        return self
