"""Tools for adapter and model files. Tensors are read and written one at a time; what they hold in memory is one tensor, never a file."""
