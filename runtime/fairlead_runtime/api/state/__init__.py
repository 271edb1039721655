"""What routes and ports share while a model loads, serves and drains: state, load, traces."""
