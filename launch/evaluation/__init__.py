"""What a trained model is worth: scores, predictions and their files."""
