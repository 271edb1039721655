"""Where a model comes from: source, download, and how the download is shown."""
