"""Where documents come from: files, dumps, the hub, the packaged corpus; their records and sentences."""
