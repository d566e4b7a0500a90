"""Recipes: the steps that there are, the default ones, and those of the user."""
