"""The log's bytes: blocks, records, blobs, compression and its versions."""
