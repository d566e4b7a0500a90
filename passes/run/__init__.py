"""One run of a recipe: pin, run a step, judge what it made, take it or go on without it."""
