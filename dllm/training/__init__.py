"""Training: an AR checkpoint becomes a diffusion LM, and diffusion drafters for AR models."""
