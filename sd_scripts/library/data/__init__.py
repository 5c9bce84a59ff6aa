"""Images and captions as the network sees them: caches of what the encoders make of them, and the batches of each step."""
