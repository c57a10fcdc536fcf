"""The bindings: the code for each transport. They decode, and hand messages to the router."""
