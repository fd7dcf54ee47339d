"""From raw documents to a token store: what `launch/prepare_data.py` runs.

The main process frames the input into records and cuts them into chunks (`inputs`); worker processes take a
chunk through all steps that look at one document (`steps`, `work`) and commit it as one file (`chunk_file`);
duplicates are found over all chunks at the end (`duplicates`), and what is left becomes the store
(`assemble`). `pipeline` holds it together.
"""
