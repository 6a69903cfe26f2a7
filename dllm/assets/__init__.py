"""Data that ships with the package: small checkpoints, demo prompts, page templates."""
