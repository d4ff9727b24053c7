"""Transfer of the anchor and the outer state between peers, in hashed chunks."""
