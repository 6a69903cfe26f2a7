"""The transformer, its key-value store, its weights and its adapters."""
