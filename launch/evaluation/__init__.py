"""What a trained model is worth: predictions, scores and their files."""
