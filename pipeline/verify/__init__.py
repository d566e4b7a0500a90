"""References and runners: who computes what the others are compared with, and everybody who computes it again."""
