"""Run requests: each runs once, asks its client questions, and is found again by its key."""
