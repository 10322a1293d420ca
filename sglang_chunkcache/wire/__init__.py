"""What crosses the border between the front process and a scheduler. Imports neither side."""
