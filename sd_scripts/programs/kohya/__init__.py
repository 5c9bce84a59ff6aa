"""Settings of kohya_ss and sd-scripts: the page's JSON, the TOML of the scripts, and what stands in LoRA files."""
