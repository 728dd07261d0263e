"""A folder of recordings: listing, pruning and mending them."""
