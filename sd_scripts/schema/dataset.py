"""Which images are trained on, how they are cut, captioned and cached."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .fields import Batch, Count, Fraction, NotNegative, Section, Seed, Show, Side, Size, WholeNumber, raise_all

_MASKED = Show(needs="masked_loss")
_HELD_OUT = Show(needs="validation_split or dataset_config")
"""A data set of a dataset_config may hold out a part of its own."""

Interpolation = Literal["auto", "lanczos", "bicubic", "bilinear", "area", "nearest"]


class DatasetOptions(Section):
    """Images, captions, buckets and caches."""

    title: ClassVar[str] = "Dataset"
    by_style: ClassVar[bool] = False
    in_pairs: ClassVar[bool] = False
    """Whether each image may have control images."""
    caches_texts: ClassVar[bool] = True
    """Whether a run may keep what text encoders make; one without them, or that trains them, cannot."""
    """Whether train_data_dir has one folder for each style, whose name is all that is said of its images."""

    train_data_dir: Annotated[
        str | None,
        Show(basic=True, kind="folder", suggestions=("toy:star", "toy:teal", "toy:subject", "toy:shapes"), unless="dataset_config"),
    ] = None
    """Folder with the training images: either images directly, or kohya's sub-folders `<repeats>_<token> <class>`; or webdataset and
    parquet files, with the package datasets. `toy:star` draws a built-in data set."""
    reg_data_dir: Annotated[str | None, Show(kind="folder")] = None
    """Folder with regularisation images (the class without your subject), laid out like train_data_dir; they are repeated until there are
    as many as training images."""
    instance_prompt: str = ""
    """Caption of training images that have no caption file (DreamBooth), such as `zwx dog`; empty takes the folder's name. It also stands
    for `[trigger]` in captions."""
    class_prompt: str = ""
    """Caption of regularisation images that have no caption file, such as `dog`, and the prompt that missing ones are made with; empty
    takes the folder's name."""
    num_class_images: Annotated[WholeNumber, Field(le=1_000_000)] = 0
    """Prior preservation without images of your own: before training, the base model makes regularisation images from class_prompt
    until there are this many. They are kept and used again. 0 makes none."""
    dataset_config: Annotated[str | None, Show(kind="file")] = None
    """A kohya dataset TOML or JSON ([general], [[datasets]], [[datasets.subsets]]), or the text of such a JSON; replaces train_data_dir,
    reg_data_dir and in_json."""
    in_json: Annotated[str | None, Show(kind="file")] = None
    """Captions in one metadata file (.json, or .jsonl with one object a line: file_name, caption or text, tags); paths are relative to
    train_data_dir."""
    resolution: Annotated[Size, Show(basic=True, unit="px")] = (1024, 1024)
    """Training size, N or W,H: each image is resized to about this area, in its own aspect ratio when buckets are on."""
    additional_resolutions: Annotated[tuple[Side, ...], Show(unit="px")] = ()
    """Train every image at these sizes too (square side N, about N x N pixels), each as a further repeat."""
    train_batch_size: Annotated[Batch, Show(basic=True)] = 1
    """Images in one forward pass on one device."""
    enable_bucket: bool = True
    """Group images by aspect ratio instead of cropping all to one shape."""
    min_bucket_reso: Annotated[Side, Show(unit="px")] = 256
    """Shortest side of a bucket."""
    max_bucket_reso: Annotated[Side, Show(unit="px")] = 2048
    """Longest side of a bucket."""
    bucket_reso_steps: Annotated[int, Field(ge=8, le=512), Show(unit="px")] = 64
    """Bucket sides are multiples of this."""
    bucket_no_upscale: bool = True
    """Never enlarge an image: small ones get a smaller bucket. min_bucket_reso and max_bucket_reso hold all the same; kohya's scripts take
    no notice of them then."""
    resize_interpolation: Interpolation = "auto"
    """Resampling filter; auto is area for shrinking and lanczos for enlarging."""
    random_crop: bool = False
    """Cut what the bucket leaves over at a random place instead of the centre. With cached latents each image keeps the place it drew
    once."""
    flip_aug: bool = False
    """Mirror half of the images from left to right. Not for subjects with text or a left and right side."""
    color_aug: bool = False
    """Small random changes of hue and brightness. Needs cache_latents off."""
    caption_extension: str = ".txt"
    """Ending of the caption file beside an image; .caption is looked for as well when there is none."""
    caption_separator: Annotated[str, Field(min_length=1)] = ","
    """What separates the parts (tags) of a caption, and joins them again; kohya's scripts join them with a comma whatever it is."""
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
    """Chance that an image is shown with an empty caption. 0.05 to 0.1 keeps guidance (CFG) working in long runs."""
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
    """How often each image is shown in an epoch, for folders without kohya's number and for in_json."""
    prior_loss_weight: NotNegative = 1.0
    """Weight of regularisation images in the loss; training images have 1."""
    masked_loss: bool = False
    """Weight the loss by a mask: the image of the same name in conditioning_data_dir (white counts, black does not), or the alpha channel
    with alpha_mask."""
    conditioning_data_dir: Annotated[str | None, Show(kind="folder", needs="masked_loss")] = None
    """Folder with masks of the same file name as the images, for masked_loss."""
    alpha_mask: Annotated[bool, _MASKED] = False
    """Use an image's alpha channel as its loss mask."""
    normalize_masked_loss: Annotated[bool, _MASKED] = False
    """Divide a masked loss by the mean of the mask, so that small masks count as much as large ones."""
    masked_loss_outside_weight: Annotated[Fraction, _MASKED] = 0.0
    """Weight in the loss of what a mask leaves black: 0 ignores it, 0.5 lets a region to be edited count twice as much as the rest."""
    on_bad_image: Literal["stop", "skip"] = "stop"
    """What to do with images that cannot be read: stop before training, after listing all of them, or skip them with a warning."""
    validation_split: Annotated[Fraction, Field(lt=1)] = 0.0
    """Part of the training images that is held out; their loss is measured with the same noise every time, of few images at several noise
    levels each."""
    validation_seed: Annotated[Seed | None, _HELD_OUT] = None
    """Seed that chooses the held-out images; None takes seed."""
    validate_every_n_steps: Annotated[Count | None, _HELD_OUT] = None
    """Measure the held-out loss every this many steps; None measures it with each save and at the end."""
    max_validation_steps: Annotated[Count | None, _HELD_OUT] = None
    """Use at most this many batches for the held-out loss; None uses all."""
    cache_latents: bool = True
    """Encode every image once instead of in each step; the VAE then leaves the GPU."""
    cache_latents_to_disk: bool = True
    """Keep encoded images on disk for the next run; off keeps them in memory only."""
    cache_text_encoder_outputs: bool = True
    """Encode every caption once; the text encoders then leave the GPU. Must be off when the text encoders are trained."""
    cache_text_encoder_outputs_to_disk: bool = True
    """Keep encoded captions on disk for the next run; off keeps them in memory only."""
    cache_dir: Annotated[str | None, Show(kind="folder")] = None
    """Where caches are kept; None is a folder `.cache` inside output_dir. Entries are found by content, so several runs may share it."""
    vae_batch_size: Batch = 1
    """Images encoded at once while caching."""
    text_encoder_batch_size: Batch = 16
    """Captions encoded at once while caching."""
    max_data_loader_n_workers: Annotated[WholeNumber, Field(le=64)] = 2
    """Background threads that read the next batches; 0 reads in the training thread."""

    @property
    def control_folders(self) -> tuple[Path, ...]:
        """The control folders that the options name: first, second, third."""
        return ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.dataset_config is None and self.train_data_dir is None:
            problems.append("train_data_dir is missing: give a folder of images, or a dataset_config")
        if self.dataset_config is not None:
            problems += [
                f"dataset_config replaces {name}; remove one of the two"
                for name in ("train_data_dir", "reg_data_dir", "in_json", "instance_prompt", "class_prompt")
                if getattr(self, name)
            ]
        if self.num_class_images and not self.class_prompt:
            problems.append("num_class_images needs class_prompt, the prompt that the images are made with, such as: a photo of a dog")
        if self.num_class_images and self.dataset_config is not None:
            problems.append("num_class_images works with train_data_dir; a dataset_config names its own regularisation images (is_reg)")
        if self.min_bucket_reso > self.max_bucket_reso:
            problems.append(f"min_bucket_reso ({self.min_bucket_reso}) is larger than max_bucket_reso ({self.max_bucket_reso})")
        if self.color_aug and self.cache_latents:
            problems.append(
                "color_aug changes the images in every step, which cached latents cannot show; turn cache_latents off or color_aug off"
            )
        raise_all(problems)
        return self


class PairDatasetOptions(DatasetOptions):
    """Pairs of control and target images with instructions."""

    in_pairs: ClassVar[bool] = True

    control_data_dir: Annotated[tuple[str, ...], Show(kind="folder")] = ()
    """Folders with the control images, the first, second and third of each sample, under the names of the images in train_data_dir.
    Empty takes the folders inside train_data_dir."""

    @property
    def control_folders(self) -> tuple[Path, ...]:
        return tuple(map(Path, self.control_data_dir))
