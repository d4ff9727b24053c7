"""Local training without any network: algorithms, optimizers, data, device."""
