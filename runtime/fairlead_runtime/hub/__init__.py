"""Where a model comes from: its source, its download, and the progress of the download."""
