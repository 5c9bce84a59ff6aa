"""The studio: a Gradio page that writes TOML files, starts trainers and shows their runs. Never imports torch."""
