"""Running a layer: where clients connect, from its start to an end in good order."""
