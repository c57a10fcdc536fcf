"""Define sessions without any I/O: no await, no clock, no randomness, no SDK."""
