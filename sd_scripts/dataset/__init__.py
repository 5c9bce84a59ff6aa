"""What the data is and in which order: scanning, buckets, captions, plan. Imports no torch; the page shows it."""
