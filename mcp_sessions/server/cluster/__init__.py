"""What the processes that serve the same sessions tell each other."""
