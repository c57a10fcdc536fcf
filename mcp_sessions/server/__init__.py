"""Sessions at work: which session a message belongs to, who hears what, what runs."""
