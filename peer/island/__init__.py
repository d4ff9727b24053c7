"""Islands: several ranks of torch.distributed on one machine that are one member of a run."""
