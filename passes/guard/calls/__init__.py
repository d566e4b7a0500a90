"""What each optimizer's call means: its model, the steps that do the same under a policy, and what it returns."""
