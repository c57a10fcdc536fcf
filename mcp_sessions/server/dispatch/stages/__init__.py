"""The features on the path of a request, one file each. ``path.py`` beside has their order."""
