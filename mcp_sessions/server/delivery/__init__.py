"""Who hears what: connections, attachments, events and changes on their way to clients."""
