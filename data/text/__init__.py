"""Documents of files, dumps, the hub and the packaged corpus; vocabularies, and text to tokens."""
