"""Adapters to what people already use around training; each needs a package of its own."""
