"""Images from models."""
