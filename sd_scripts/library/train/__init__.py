"""One run, from its options to saved files."""
