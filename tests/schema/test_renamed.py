"""Option names of the programs that came before a kind of run: each is answered with what to use instead."""

from __future__ import annotations

from typing import Any

import pytest

from sd_scripts.families.ddpm.options import Ddpm
from sd_scripts.families.lgt.options import Lgt
from sd_scripts.schema.command_line import NO_OPTIONS, parse_cli
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.flat import build, fields, flatten
from sd_scripts.schema.legacy import FORMER
from sd_scripts.schema.runs import RunOptions

# As docs of the small DDPM's earlier program list them, settings and flags.
DDPM = """
amp amp_dtype attn_head_dim attn_heads attn_resolutions batch_size caption_drop_prob caption_field channel_mults ckpt-keep-last
ckpt_keep_last compile_cudagraphs compile_warmup_steps cond_drop_prob config cosine_s cudnn_benchmark curriculum_enabled curriculum_steps
data_root decay_steps dropout ema_decay_fast ema_decay_slow ema_switch_step enable_flash_sdp enable_math_sdp enable_mem_efficient_sdp
eval_cfg eval_every eval_n eval_prompts_file eval_sampler eval_seed eval_steps failed_list grad_accum_steps grad_checkpointing
grad_clip_norm image_dir image_size images_only latent_cache latent_cache_dir latent_cache_fallback latent_cache_index latent_cache_sharded
latent_cache_strict latent_channels latent_downsample_factor latent_dtype latent_precompute latent_shard_cache_size log_every lr max_steps
meta_dir min_lr_ratio min_tag_count mode noise_schedule num_res_blocks num_workers out_dir persistent_workers pin_memory prefetch_factor
require_512 resume_ckpt sanity_overfit_images sanity_overfit_max_loss sanity_overfit_steps save_every self_cond_prob tag_drop_prob tags_dir
text_dim text_max_len text_merges_path text_vocab_path tf32 timesteps token_drop_prob tokenizer_type use_scale_shift_norm
use_text_conditioning vae_freeze vae_pretrained vae_scaling_factor val_ratio warmup_steps weight_decay
""".split()


def test_every_name_of_the_earlier_program_is_answered_with_what_to_use() -> None:
    said = {}
    for name in DDPM:
        with pytest.raises(OptionError) as caught:
            parse_cli(Ddpm, ["--train_data_dir=toy:shapes", f"--{name}", "1"])
        said[name] = str(caught.value)
    assert {name: text for name, text in said.items() if f"--{name}: use " not in text} == {}


@pytest.mark.parametrize("run", [Ddpm, Lgt], ids=lambda run: run.__name__)
def test_what_is_advised_exists(run: type[RunOptions]) -> None:
    advised = {name: text.replace("--", "").split(",")[0].split(":")[0].split()[0] for name, text in run.renamed.items()}
    assert {name: word for name, word in advised.items() if word not in ("nothing", *NO_OPTIONS, *fields(run))} == {}
    assert not run.renamed.keys() & fields(run).keys()


def test_names_of_earlier_versions_are_read_in_files_and_on_the_command_line() -> None:
    given: dict[str, Any] = {"train_data_dir": "toy:shapes", "oom_ladder": True, "rehearse": "off"}
    built = build(Ddpm, given)
    assert built.memory.oom_fallback and built.memory.preflight == "off" and not FORMER.keys() & flatten(built).keys()
    line = parse_cli(Ddpm, ["--train_data_dir=toy:shapes", "--oom_ladder", "--rehearse", "off"])
    assert line.options == built and line.given == {"train_data_dir", "oom_fallback", "preflight"}
    for off in ("--no_oom_ladder", "--no-oom_ladder", "--oom_ladder=false"):
        assert not parse_cli(Ddpm, ["--train_data_dir=toy:shapes", off]).options.memory.oom_fallback
