"""The parts of launch/tables/verifying/verification.py: what is printed, what is recomputed, and where the two disagree."""
