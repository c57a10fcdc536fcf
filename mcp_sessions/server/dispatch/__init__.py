"""Which session a message belongs to, who serves it, and how sessions begin and end."""
