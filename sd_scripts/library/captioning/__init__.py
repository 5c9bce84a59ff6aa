"""Who writes captions: models on this machine, a server of the user's, the reader of the toy worlds. Knows images and words, no files."""
