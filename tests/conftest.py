"""Settings of every test process: one thread, and property tests that no slow machine can fail."""

import os

import torch
from hypothesis import settings

# Tests run side by side, and many start peers of their own: threads would only stand in each other's way.
torch.set_num_threads(1)

settings.register_profile("local", deadline=None, max_examples=50)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
