"""Packages of an installation that have a shorter name than their source: see ``wheel.packages`` of pyproject.toml."""
