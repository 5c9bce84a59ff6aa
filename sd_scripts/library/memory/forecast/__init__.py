"""The memory that a run will take, before it starts: measured on the structure of its networks, without weights and without a GPU."""
