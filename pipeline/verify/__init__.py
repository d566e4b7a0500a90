"""References, which every result is compared with, and the backends that run the final model."""
