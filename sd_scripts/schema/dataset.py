"""Which pictures are trained on, how they are cut, captioned and cached."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .fields import Batch, Count, Fraction, NotNegative, Section, Seed, Show, Side, Size, WholeNumber, raise_all

_MASKED = Show(needs="masked_loss")
_HELD_OUT = Show(needs="validation_split or dataset_config")
"""A data set of a dataset_config may hold out a part of its own."""

Interpolation = Literal["auto", "lanczos", "bicubic", "bilinear", "area", "nearest"]


class DatasetOptions(Section):
    """Pictures, captions, buckets and caches."""

    title: ClassVar[str] = "Dataset"
    by_style: ClassVar[bool] = False
    """Whether train_data_dir has one folder for each style, whose name is all that is said of its pictures."""

    train_data_dir: Annotated[
        str | None,
        Show(basic=True, kind="folder", suggestions=("toy:star", "toy:teal", "toy:subject", "toy:shapes"), unless="dataset_config"),
    ] = None
    """Folder with the training pictures: either pictures directly, or kohya's sub-folders `<repeats>_<token> <class>`; or webdataset and
    parquet files, with the package datasets. `toy:star` draws a built-in data set."""
    reg_data_dir: Annotated[str | None, Show(kind="folder")] = None
    """Folder with regularisation pictures (the class without your subject), laid out like train_data_dir; they are repeated until there are
    as many as training pictures."""
    instance_prompt: str = ""
    """Caption of training pictures that have no caption file (DreamBooth), such as `zwx dog`; empty takes the folder's name. It also stands
    for `[trigger]` in captions."""
    class_prompt: str = ""
    """Caption of regularisation pictures that have no caption file, such as `dog`, and the prompt that missing ones are made with; empty
    takes the folder's name."""
    num_class_images: Annotated[WholeNumber, Field(le=1_000_000)] = 0
    """Prior preservation without pictures of your own: before training, the base model makes regularisation pictures from class_prompt
    until there are this many. They are kept and used again. 0 makes none."""
    dataset_config: Annotated[str | None, Show(kind="file")] = None
    """A kohya dataset TOML or JSON ([general], [[datasets]], [[datasets.subsets]]); replaces train_data_dir, reg_data_dir and in_json."""
    in_json: Annotated[str | None, Show(kind="file")] = None
    """Captions in one metadata file (.json, or .jsonl with one object a line: file_name, caption or text, tags); paths are relative to
    train_data_dir."""
    resolution: Annotated[Size, Show(basic=True, unit="px")] = (1024, 1024)
    """Training size, N or W,H: each picture is resized to about this area, in its own aspect ratio when buckets are on."""
    additional_resolutions: Annotated[tuple[Side, ...], Show(unit="px")] = ()
    """Train every picture at these sizes too (square side N, about N x N pixels), each as a further repeat."""
    train_batch_size: Annotated[Batch, Show(basic=True)] = 1
    """Pictures in one forward pass on one device."""
    enable_bucket: bool = True
    """Group pictures by aspect ratio instead of cropping all to one shape."""
    min_bucket_reso: Annotated[Side, Show(unit="px")] = 256
    """Shortest side of a bucket."""
    max_bucket_reso: Annotated[Side, Show(unit="px")] = 2048
    """Longest side of a bucket."""
    bucket_reso_steps: Annotated[int, Field(ge=8, le=512), Show(unit="px")] = 64
    """Bucket sides are multiples of this."""
    bucket_no_upscale: bool = True
    """Never enlarge a picture: small ones get a smaller bucket."""
    resize_interpolation: Interpolation = "auto"
    """Resampling filter; auto is area for shrinking and lanczos for enlarging."""
    random_crop: bool = False
    """Cut what the bucket leaves over at a random place instead of the centre. With cached latents each picture keeps the place it drew
    once."""
    flip_aug: bool = False
    """Mirror half of the pictures from left to right. Not for subjects with text or a left and right side."""
    color_aug: bool = False
    """Small random changes of hue and brightness. Needs cache_latents off."""
    caption_extension: str = ".txt"
    """Ending of the caption file beside a picture; .caption is looked for as well when there is none."""
    caption_separator: Annotated[str, Field(min_length=1)] = ","
    """What separates the parts (tags) of a caption."""
    shuffle_caption: bool = False
    """Shuffle the parts of a caption each time. Works together with cached text embeddings, see caption_variants."""
    keep_tokens: WholeNumber = 0
    """This many parts at the start stay in place and are never dropped when captions are shuffled or thinned."""
    keep_tokens_separator: str = ""
    """A mark such as ||| in the caption: the parts before it stay in place (and after a second one, at the end). Wins over keep_tokens; the
    mark itself is always removed."""
    secondary_separator: str = ""
    """A mark such as ;;; that joins parts which move together; it becomes caption_separator at the end."""
    enable_wildcard: bool = False
    """Read {a|b|c} in captions as a random choice, and a caption file of several lines as a choice of one line."""
    caption_prefix: str = ""
    """Text put before every caption, followed by a space."""
    caption_suffix: str = ""
    """Text put after every caption, after a space."""
    caption_dropout_rate: Fraction = 0.0
    """Chance that a picture is shown with an empty caption. 0.05 to 0.1 keeps guidance (CFG) working in long runs."""
    caption_dropout_every_n_epochs: WholeNumber = 0
    """Every N-th epoch is shown with empty captions; 0 never."""
    caption_tag_dropout_rate: Annotated[Fraction, Field(lt=1)] = 0.0
    """Chance that each part of a caption, apart from the kept ones, is left out."""
    caption_token_dropout_rate: Annotated[Fraction, Field(lt=1)] = 0.0
    """Chance that each word of a caption, apart from the kept parts, is left out."""
    token_warmup_min: Count = 1
    """Parts of a caption shown at the start of token warm-up, besides the kept ones."""
    token_warmup_step: NotNegative = 0.0
    """Optimizer steps (below 1: fraction of the run) until all parts of a caption are shown; 0 turns token warm-up off."""
    caption_variants: Annotated[WholeNumber, Field(le=65536)] = 16
    """When captions are random (shuffle, wildcards, dropout of tags or words), draw from this many versions of each caption, so that text
    embeddings can be cached; 0 draws a new one every time."""
    dataset_repeats: Batch = 1
    """How often each picture is shown in an epoch, for folders without kohya's number and for in_json."""
    prior_loss_weight: NotNegative = 1.0
    """Weight of regularisation pictures in the loss; training pictures have 1."""
    masked_loss: bool = False
    """Weight the loss by a mask: the picture of the same name in conditioning_data_dir (white counts, black does not), or the alpha channel
    with alpha_mask."""
    conditioning_data_dir: Annotated[str | None, Show(kind="folder", needs="masked_loss")] = None
    """Folder with masks of the same file name as the pictures, for masked_loss."""
    alpha_mask: Annotated[bool, _MASKED] = False
    """Use a picture's alpha channel as its loss mask."""
    normalize_masked_loss: Annotated[bool, _MASKED] = False
    """Divide a masked loss by the mean of the mask, so that small masks count as much as large ones."""
    masked_loss_outside_weight: Annotated[Fraction, _MASKED] = 0.0
    """Weight in the loss of what a mask leaves black: 0 ignores it, 0.5 lets a region to be edited count twice as much as the rest."""
    on_bad_image: Literal["stop", "skip"] = "stop"
    """What to do with pictures that cannot be read: stop before training, after listing all of them, or skip them with a warning."""
    validation_split: Annotated[Fraction, Field(lt=1)] = 0.0
    """Part of the training pictures that is held out; their loss is measured with the same noise every time."""
    validation_seed: Annotated[Seed | None, _HELD_OUT] = None
    """Seed that chooses the held-out pictures; None takes seed."""
    validate_every_n_steps: Annotated[Count | None, _HELD_OUT] = None
    """Measure the held-out loss every this many steps; None measures it with each save and at the end."""
    max_validation_steps: Annotated[Count | None, _HELD_OUT] = None
    """Use at most this many batches for the held-out loss; None uses all."""
    cache_latents: bool = True
    """Encode every picture once instead of in each step; the VAE then leaves the device."""
    cache_latents_to_disk: bool = True
    """Keep encoded pictures on disk for the next run; off keeps them in memory only."""
    cache_text_encoder_outputs: bool = True
    """Encode every caption once; the text encoders then leave the device. Must be off when the text encoders are trained; FLUX may train
    CLIP-L while T5's outputs stay cached."""
    cache_text_encoder_outputs_to_disk: bool = True
    """Keep encoded captions on disk for the next run; off keeps them in memory only."""
    cache_dir: Annotated[str | None, Show(kind="folder")] = None
    """Where caches are kept; None is a folder `.cache` inside output_dir. Entries are found by content, so several runs may share it."""
    vae_batch_size: Batch = 1
    """Pictures encoded at once while caching."""
    text_encoder_batch_size: Batch = 16
    """Captions encoded at once while caching."""
    max_data_loader_n_workers: Annotated[WholeNumber, Field(le=64)] = 2
    """Background threads that read the next batches; 0 reads in the training thread."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.dataset_config is None and self.train_data_dir is None:
            problems.append("train_data_dir is missing: give a folder of pictures, or a dataset_config")
        if self.dataset_config is not None:
            problems += [
                f"dataset_config replaces {name}; remove one of the two"
                for name in ("train_data_dir", "reg_data_dir", "in_json", "instance_prompt", "class_prompt")
                if getattr(self, name)
            ]
        if self.num_class_images and not self.class_prompt:
            problems.append("num_class_images needs class_prompt, the prompt that the pictures are made with, such as: a photo of a dog")
        if self.num_class_images and self.dataset_config is not None:
            problems.append("num_class_images works with train_data_dir; a dataset_config names its own regularisation pictures (is_reg)")
        if self.min_bucket_reso > self.max_bucket_reso:
            problems.append(f"min_bucket_reso ({self.min_bucket_reso}) is larger than max_bucket_reso ({self.max_bucket_reso})")
        if self.color_aug and self.cache_latents:
            problems.append(
                "color_aug changes the pictures in every step, which cached latents cannot show; turn cache_latents off or color_aug off"
            )
        raise_all(problems)
        return self
