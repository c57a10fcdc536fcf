"""The requests that clients have open in this process."""
