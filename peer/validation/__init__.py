"""Scoring of other members' contributions by a validator."""
