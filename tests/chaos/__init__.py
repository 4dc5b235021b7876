"""Programs that kill, load and feed runs for a long time."""
