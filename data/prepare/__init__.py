"""Preparation of raw documents as a token store, for `launch/prepare_data.py`.

The main process cuts the input into records, and these into chunks (`inputs`). Worker processes take a chunk
through all steps on single documents (`steps`, `work`) and commit it as one file (`chunk_file`). At the end
duplicates are found over all chunks (`duplicates`), and the other documents become the store (`assemble`).
`pipeline` holds it together.
"""
