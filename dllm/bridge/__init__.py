"""Bridges to other libraries: transformers' custom_generate, diffusers' schedulers, serving engines."""
