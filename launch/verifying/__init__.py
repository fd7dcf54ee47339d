"""The parts of launch/verification.py: what is printed, what is recomputed, and where the two disagree."""
