"""Exchange messages between the processes that serve the same sessions."""
