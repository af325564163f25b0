"""Heads that guess further tokens from a model's hidden states; `spec/` says what guesses are."""
