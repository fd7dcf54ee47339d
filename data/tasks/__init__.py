"""What a model is scored on: text files and data sets as windows of tokens whose last ones count."""
