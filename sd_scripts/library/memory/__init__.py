"""Where weights and activations are, in which precision, and how much memory that takes."""
