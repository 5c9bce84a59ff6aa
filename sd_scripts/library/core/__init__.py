"""What every room of the engine uses."""
