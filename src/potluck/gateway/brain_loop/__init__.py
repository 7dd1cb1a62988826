"""The one Brain, with its clock and its log."""
