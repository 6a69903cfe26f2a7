"""Diffusion drafters for AR models: one file each, proposing only."""
