"""The pages of `gallery`: texts and figure."""
