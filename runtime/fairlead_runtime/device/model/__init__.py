"""The model that runs in every step: packed rows on the paged cache, fused layers, experts."""
