"""The wire contract: record batches and errors. Standard library and codecs only, no I/O."""
