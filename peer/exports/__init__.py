"""Models that others load: a run's model as safetensors, as a folder for transformers, as GGUF; and where it goes."""
