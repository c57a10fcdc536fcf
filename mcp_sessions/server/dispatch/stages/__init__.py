"""The features on the path of a request, one file each. ``path.py`` has their order."""
