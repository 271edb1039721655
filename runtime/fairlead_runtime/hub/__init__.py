"""The origin of a model: its source, its download, and the progress of the download."""
