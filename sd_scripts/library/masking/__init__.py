"""What separates the object in an image from its background."""
