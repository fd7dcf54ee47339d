"""From tokens to samples: windows of GPT, masked segments of BERT, blends; of stores and of streams."""
