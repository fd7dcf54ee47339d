"""Where documents come from: files, dumps, the hub, the packaged corpus.

Their records, sentences and splits.
"""
