"""One module for each tab; build(context) makes its components and wires its events."""
