"""What a trained model says."""
