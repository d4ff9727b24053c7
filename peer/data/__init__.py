"""Training data by URL: token shards with a manifest, mirrors that may lie, a disk cache, and how shards are built."""
