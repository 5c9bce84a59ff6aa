"""From names and files to networks: finding models, telling them apart, reading and writing their layouts."""
