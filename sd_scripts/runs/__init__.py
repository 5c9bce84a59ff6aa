"""What a run leaves behind, and how its processes start. No torch."""
