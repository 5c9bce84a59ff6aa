"""What tells the thing in an image from its ground."""
