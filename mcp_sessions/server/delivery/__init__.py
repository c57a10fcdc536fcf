"""Deliver events and changes to clients, and track connections and attachments."""
