"""Answers that were given before: found again by what was asked, exactly or nearly."""
