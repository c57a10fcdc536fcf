"""Route messages to their session and handler; start and end sessions."""
