"""The keys of such a configuration: those with an option of the same meaning, those that nothing is lost without, and how a
key finds its rule. The rules are in rules.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sd_scripts.schema import flat
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import Sheet

from ..table import NamedModel
from .models import BASES, PROGRAM

Rule = Callable[["KeyReader", str, object], None]


class KeyReader(Sheet):
    """One configuration, its values by dotted key with references resolved, as the kind of run that it is for."""

    def __init__(
        self, run: type[RunOptions], given: Mapping[str, object], model: NamedModel, rules: Mapping[str, Rule], groups: Mapping[str, Rule]
    ) -> None:
        super().__init__(run, given)
        self._rules, self._groups, self.model = rules, groups, model
        self.seed_era = any(self.given.get(key) is not None for key in SEED_KEYS)
        """Whether the file is of the first schema."""
        self.predict: dict[str, object] = {}
        """Options of prediction that the file names besides."""
        self.refused: list[str] = []
        """What will not happen, as sentences."""

    def key(self, key: str) -> None:
        """Writes the row of one key."""
        value = self.given[key]
        if key in ("model.lora.r", "model.lora.lora_alpha") and self.given.get("model.rank") is not None:
            self.skip(key, "model.rank is used in its place")
        elif key in PLAIN and not (value is None or value == ""):
            self.take(key, PLAIN[key], value)
        elif key in PLAIN:
            self.skip(key, "it is empty")
        elif key in NOT_NEEDED:
            self.skip(key, NOT_NEEDED[key])
        elif key in self._rules:
            self._rules[key](self, key, value)
        elif (group := next((prefix for prefix in self._groups if key.startswith(prefix)), None)) is not None:
            self._groups[group](self, key, value)
        else:
            near = flat.nearest(key, [*PLAIN, *self._rules, *NOT_NEEDED])
            text = f"it is not a key of {PROGRAM} that this version knows.{near}"
            self.write(key, "unknown", text)
            self.refused.append(f"{key}: {text}")

    def refuse(self, key: str, text: str) -> None:
        """See Sheet."""
        super().refuse(key, text)
        self.refused.append(f"{key}: {text}")

    def take(self, key: str, option: str, value: object, note: str = "") -> None:
        """See Sheet."""
        if option in ENCODERS_DEVICES and option not in self.known:
            self.skip(key, "encoders come to the GPU one after the other, and leave it once their outputs are cached")
        else:
            super().take(key, option, value, note)

    def also(self, key: str, option: str, value: object) -> None:
        """A second option of the same key, where the run has it."""
        if option in self.known:
            self.put(option, value, key)

    def assume_rest(self) -> None:
        """What the file leaves to that program."""
        base = BASES.get(self.run.family)
        layers = {} if self.given.get("model.lora.target_modules") else self.model.layers
        for option, value in {**DEFAULTS, **layers, **({"pretrained_model_name_or_path": base} if base else {})}.items():
            if not self.decided(option):
                self.assume(option, value, PROGRAM)


SEED_KEYS = (
    "model.rank",
    "cache.vae_encoder_device",
    "cache.text_encoder_device",
    "predict.devices.transformer",
    "data.init_args.image_size",
    "data.init_args.cache_drop_rate",
    "logging.logging_dir",
)

PLAIN = {
    "model.lora.r": "network_dim",
    "model.lora.lora_alpha": "network_alpha",
    "data.batch_size": "train_batch_size",
    "data.num_workers": "max_data_loader_n_workers",
    "data.init_args.caption_dropout_rate": "caption_dropout_rate",
    "data.init_args.cache_drop_rate": "caption_dropout_rate",
    "optimizer.init_args.lr": "learning_rate",
    "train.gradient_accumulation_steps": "gradient_accumulation_steps",
    "train.max_train_steps": "max_train_steps",
    "train.checkpointing_steps": "save_every_n_steps",
    "train.max_grad_norm": "max_grad_norm",
    "train.gradient_checkpointing": "gradient_checkpointing",
    "train.seed": "seed",
    "cache.cache_dir": "cache_dir",
    "cache.vae_encoder_device": "vae_device",
    "cache.text_encoder_device": "text_encoder_device",
    "cache.devices.vae": "vae_device",
    "cache.devices.vae_encoder": "vae_device",
    "cache.devices.text_encoder": "text_encoder_device",
    "lr_scheduler.scheduler_type": "lr_scheduler",
    "lr_scheduler.warmup_steps": "lr_warmup_steps",
    "logging.output_dir": "output_dir",
    "logging.notes": "training_comment",
}
"""Keys whose value is that of an option."""

ENCODERS_DEVICES = ("vae_device", "text_encoder_device")
"""Options that not all kinds of run have: where encoders compute."""

DEFAULTS: dict[str, object] = {
    "network_dim": 16,
    "network_alpha": 16,
    "gradient_accumulation_steps": 4,
    "max_train_steps": 1000,
    "save_every_n_steps": 500,
    "gradient_checkpointing": True,
    "mixed_precision": "bf16",
    "learning_rate": 1e-4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "timestep_sampling": "uniform",
    "save_model_as": "diffusers",
}
"""Values that program uses where the file says nothing, and those it cannot be told: it always draws times uniformly."""

NOT_READ = "that program does not read it"
NOT_NEEDED = {
    "data.class_path": "there is one kind of data set here, which finds pairs by itself",
    "data.init_args.cache_dir": "that program takes cache.cache_dir in its place",
    "data.init_args.use_cache": "that program takes cache.use_cache in its place",
    "data.init_args.prompt_empty_drop_keys": "the empty instruction is always cached",
    "data.init_args.prompt_image_dropout_rate": NOT_READ,
    "data.init_args.use_edit_mask": "that program does not read it; masks are used with masked_loss",
    "data.init_args.processor.class_path": "images are cut in one way here, see resolution and enable_bucket",
    "data.init_args.processor.init_args.max_aspect_ratio": "buckets have limits of their own, min_bucket_reso and max_bucket_reso",
    "data.init_args.processor.init_args.resize_controls_mask_to_image": "a mask always has the size of the image that is learned",
    "cache.prompt_empty_drop_keys": "the empty instruction is always cached",
    "cache.devices.text_encoder_2": "encoders come to the GPU one after the other, and leave it once their outputs are cached",
    "cache.devices.dit": "the transformer is not in memory while caches are filled",
    "cache.devices.prompt_enhancer": "there is no prompt enhancer",
    "model.lora.adapter_name": "the file's name is output_name",
    "model.pretrained_embeddings": "all parts come with the base model",
    "lr_scheduler.num_cycles": NOT_READ,
    "lr_scheduler.power": NOT_READ,
    "train.num_epochs": "the number of steps decides, max_train_steps",
    "train.train_batch_size": "that program takes data.batch_size in its place",
    "train.low_memory": "encoders leave the GPU by themselves once their outputs are cached",
    "train.fit_device": "the launcher chooses the training devices",
    "logging.logging_dir": "the log is inside the folder of the run",
    "logging.tags": "they are labels of that program's trackers",
}
