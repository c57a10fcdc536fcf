"""Requests at work: each runs once, asks its client back, and is found again by its key."""
